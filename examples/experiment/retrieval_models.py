"""The models of the tables of retrieval: arms, how they are read, and what they are called."""

from __future__ import annotations

from typing import NamedTuple

PLAIN, LONGER = "regular-1.35x", "regular-1.75x"
"""Plain training for the FLOPs of ``branched``, and for those of ``separate``."""

UNTRAINED = "untrained"
LENGTHS = {PLAIN: "1.35 times as long", LONGER: "1.75 times as long"}
FREE = ("nearest known question", "TF-IDF, characters", "TF-IDF, words")
READINGS = {"best readout": "as it is", "ridge": "behind a ridge map", "canonical": "behind a canonical map"}
READINGS |= {"classifier": "behind a linear classifier"}
READINGS |= {"heads": "behind projection heads", "wide heads": "behind wide projection heads"}
"""How a model without a JEPA objective is read."""
WAYS = {"ridge": "ridge map", "canonical": "canonical map", "heads": "projection heads"}
WAYS |= {"wide heads": "wide projection heads, all layers"}
"""What is fitted on pairs, behind any embeddings."""

SHORTER = ("separate-infonce-4",)
"""Arms with fewer epochs than those whose FLOPs plain training has: no difference from it is given."""


class Model(NamedTuple):
    """A row of the table: an arm, and by what candidates are ranked."""

    arm: str
    method: str
    words: str

    @property
    def short(self) -> bool:
        """Whether it is in the short table: neither variants nor maps behind embeddings that training reads are."""
        return not self.method.startswith("trained, ") and any(self.arm == model.arm for model in MODELS)


MODELS = (
    *(Model("none", method, method) for method in FREE),
    *(
        Model(arm, method, f"{words_of_arm}, {words}")
        for arm, words_of_arm in {UNTRAINED: UNTRAINED, **{arm: f"plain, {LENGTHS[arm]}" for arm in LENGTHS}}.items()
        for method, words in (("best readout", "best readout"), *WAYS.items(), ("classifier", "linear classifier"))
    ),
    Model("branched-cosine", "trained", "LM loss + cosine, `branched`"),
    Model("branched-cosine", "trained, ridge", "LM loss + cosine, `branched`, ridge map"),
    Model("branched-cosine", "trained, canonical", "LM loss + cosine, `branched`, canonical map"),
    Model("infonce-alone", "trained", "InfoNCE alone, `separate`"),
    Model("infonce-alone", "trained, ridge", "InfoNCE alone, `separate`, ridge map"),
    Model("infonce-alone", "trained, canonical", "InfoNCE alone, `separate`, canonical map"),
    Model("infonce-alone", "trained, heads", "InfoNCE alone, `separate`, projection heads"),
    Model("branched-infonce", "trained", "LM loss + InfoNCE, `branched`"),
    Model("branched-infonce", "trained, ridge", "LM loss + InfoNCE, `branched`, ridge map"),
    Model("branched-infonce", "trained, canonical", "LM loss + InfoNCE, `branched`, canonical map"),
    Model("separate-infonce", "trained", "LM loss + InfoNCE, `separate`"),
    Model("separate-infonce", "trained, ridge", "LM loss + InfoNCE, `separate`, ridge map"),
    Model("separate-infonce", "trained, canonical", "LM loss + InfoNCE, `separate`, canonical map"),
    Model("separate-infonce", "trained, heads", "LM loss + InfoNCE, `separate`, projection heads"),
    Model("branched-infonce", "heads", "LM loss + InfoNCE, `branched`, projection heads at the best layer"),
    Model("separate-infonce", "heads", "LM loss + InfoNCE, `separate`, projection heads at the best layer"),
    Model("branched-infonce-k0", "trained", "LM loss + InfoNCE, `branched`, no predictor tokens"),
    Model("separate-infonce-k0", "trained", "LM loss + InfoNCE, `separate`, no predictor tokens"),
    Model("separate-infonce-mean", "trained", "LM loss + InfoNCE, `separate`, means of texts"),
    Model("separate-infonce-mean", "trained, ridge", "LM loss + InfoNCE, `separate`, means of texts, ridge map"),
    Model(
        "separate-infonce-mean", "trained, canonical", "LM loss + InfoNCE, `separate`, means of texts, canonical map"
    ),
)
VARIANTS = {
    "separate-infonce-32": "LM loss + InfoNCE, `separate`, 32 pairs a step",
    "separate-infonce-4": "LM loss + InfoNCE, `separate`, 4 epochs",
    "separate-infonce-0.05": "LM loss + InfoNCE of weight 0.05",
    "separate-infonce-0.2": "LM loss + InfoNCE of weight 0.2",
    "separate-infonce-0.5": "LM loss + InfoNCE of weight 0.5",
    "separate-infonce-1": "LM loss + InfoNCE of weight 1",
    "separate-infonce-1-layer-15": "LM loss + InfoNCE of weight 1 in layer 15",
    "separate-infonce-1-middle": "LM loss + InfoNCE of weight 1 on means of layer 15",
    "separate-infonce-1-mean": "LM loss + InfoNCE of weight 1 on means of the last layer",
    "separate-cosine": "LM loss + cosine, `separate`",
    "separate-cosine-1-mean": "LM loss + cosine of weight 1 on means of the last layer",
    "separate-vicreg": "LM loss + VICReg",
    "separate-sigreg": "LM loss + SIGReg",
    "separate-infonce-wrong": "LM loss + InfoNCE, shuffled partners",
}
"""Other arms that a grid may have: what they are called; every further arm is called by its name."""
