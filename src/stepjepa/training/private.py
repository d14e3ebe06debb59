"""Private parts of libraries that stepjepa relies on, each with the reason; a check that transformers has its own.

A private method that is renamed would never be called, and no error would say so.
"""

import inspect
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal

import transformers

from stepjepa.base.errors import UserError

KNOWN_TO_WORK = "5.20.0", "5.24.0"
"""The oldest and the newest transformers that the tests have run on (``make test-oldest``, ``make test-newest``)."""

Use = Literal["overridden", "called", "read", "written"]


@dataclass(frozen=True, slots=True)
class PrivatePart:
    """One private name of a library.

    Args:
        owner: the class or module that has it, as ``module:name``.
        name: the name.
        use: what stepjepa does with it.
        reason: why no public name does.
        parameters: of a method or function, the names of all its parameters; None where they do not matter.
    """

    owner: str
    name: str
    use: Use
    reason: str
    parameters: tuple[str, ...] | None = None

    def fault(self) -> str | None:
        """Return the difference between the installed release and this description; None if there is none."""
        owner = _owner(self.owner)
        source = _source(getattr(owner, "__module__", self.owner.partition(":")[0]))
        # Attributes that are set on instances alone are seen in the source of their class.
        of_self, declared = _names(r"\bself\.(\w+)", source), _names(r"\b(\w+): ", source)
        attribute = self.parameters is None and self.name in of_self | declared
        if not hasattr(owner, self.name) and not attribute:
            return f"{self.owner} has no {self.name}"
        if self.use == "overridden" and self.name not in of_self:
            return f"{self.owner} never calls {self.name}"
        if self.parameters is None:
            return None
        names = tuple(inspect.signature(getattr(owner, self.name)).parameters)
        expected, actual = ", ".join(self.parameters), ", ".join(names)
        return None if names == self.parameters else f"{self.owner}.{self.name} takes ({actual}), expected ({expected})"


@cache
def _source(module: str) -> str:
    """Return the source code of a module that is loaded; cached, since many parts are of one module."""
    return inspect.getsource(sys.modules[module])


@cache
def _names(pattern: str, source: str) -> frozenset[str]:
    """Return the names that a pattern finds in a source; cached, since every trainer looks for all parts."""
    return frozenset(re.findall(pattern, source))


def _owner(path: str) -> Any:
    module, _, name = path.partition(":")
    owner: Any = import_module(module)
    for part in filter(None, name.split(".")):
        owner = getattr(owner, part)
    return owner


def _overridden(name: str, parameters: str, reason: str) -> PrivatePart:
    return PrivatePart("transformers:Trainer", name, "overridden", reason, ("self", *parameters.split()))


_MODEL, _CONFIG = "transformers:PreTrainedModel", "transformers:PreTrainedConfig"

PARTS = (
    _overridden("_get_train_sampler", "train_dataset", "no public hook takes a sampler"),
    _overridden(
        "_run_epoch",
        "model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial ignore_keys_for_eval start_time "
        "resume_from_checkpoint epochs_trained steps_trained_in_current_epoch",
        "a run that is resumed after its last step would train one more",
    ),
    _overridden("_get_grad_norm", "model grad_norm", "the norm is looked at before a step; no hook is given it"),
    _overridden("_get_output_dir", "trial", "a checkpoint is written into a temporary folder, which is then renamed"),
    _overridden("_save_checkpoint", "model trial", "the same; `on_save` comes after old checkpoints are deleted"),
    _overridden(
        "_finalize_training",
        "trial num_train_samples start_time",
        "weights of evaluation come before those of the best checkpoint; old checkpoints are removed, not the user's",
    ),
    _overridden("_save", "output_dir state_dict", "heads of terms are saved in files of their own"),
    _overridden("_load_from_checkpoint", "resume_from_checkpoint model", "heads of terms are loaded from their files"),
    _overridden("_load_best_model", "", "the same for the best checkpoint, and its averaged weights"),
    _overridden(
        "_determine_best_metric",
        "metrics trial",
        "with `save_strategy best` its answer replaces what a callback asks for, such as a checkpoint to stop by",
    ),
    _overridden("_issue_warnings_after_load", "load_result", "missing weights are an error; Trainer warns"),
    _overridden(
        "_load_optimizer_and_scheduler",
        "checkpoint",
        "settings that this launch changes replace those of the checkpoint, and averaged weights are loaded",
    ),
    _overridden("_push_from_checkpoint", "checkpoint_folder", "it would upload a folder that is about to be renamed"),
    PrivatePart(
        "transformers:Trainer", "_tr_loss", "written", "the loss since the last line of logs, for exact resume"
    ),
    PrivatePart("transformers:Trainer", "_total_loss_scalar", "written", "the same up to the last line of logs"),
    PrivatePart("transformers:Trainer", "_globalstep_last_logged", "written", "the step of the last line of logs"),
    PrivatePart("transformers:Trainer", "_memory_tracker", "called", "memory of an evaluation, if it is asked for"),
    PrivatePart("transformers:Trainer", "_initial_global_step", "read", "whether a launch that failed has trained"),
    PrivatePart(
        "transformers:Trainer", "_internal_call", "called", "`save_model` uploads a folder without this argument"
    ),
    PrivatePart(_CONFIG, "_attn_implementation", "written", "the attention in use; the public setter needs a model"),
    PrivatePart(_MODEL, "_supports_sdpa", "read", "whether a model takes sdpa, without trying to load it so"),
    PrivatePart(_MODEL, "_supports_attention_backend", "read", "whether masks reach the layers of a model"),
    PrivatePart(_MODEL, "_keys_to_ignore_on_save", "read", "weights that a checkpoint lacks on purpose"),
    PrivatePart(
        "transformers.modeling_layers:GradientCheckpointingLayer",
        "_gradient_checkpointing_func",
        "written",
        "FLOPs are counted on a copy, whose blocks must not get the hooks that the public method adds",
    ),
    PrivatePart(
        "transformers:PreTrainedTokenizerBase",
        "_auto_class",
        "read",
        "whether a tokenizer is of a model's own code, which transformers may save so that it can't load it",
    ),
    PrivatePart(
        "transformers:PreTrainedTokenizerFast",
        "_encode_plus",
        "read",
        "texts are passed to the backend of a tokenizer whose class leaves this method as it is",
    ),
    PrivatePart("transformers:PreTrainedTokenizerFast", "_convert_encoding", "read", "the same"),
    PrivatePart(
        "transformers:PreTrainedTokenizerFast",
        "_tokenizer",
        "written",
        "a copy of a tokenizer gets a backend that adds no space in front of a text",
    ),
    PrivatePart(
        "transformers.utils.chat_template_utils",
        "_compile_jinja_template",
        "called",
        "the tokenizer's method compiles and renders together, and takes no functions of the template's",
        ("chat_template",),
    ),
)
"""Private parts of transformers."""

OTHER_LIBRARIES = {
    "torch._dynamo": "`recompile_limit`: beyond 8 shapes FlexAttention would silently run uncompiled",
    "torch._subclasses.fake_tensor": "FakeTensorMode: FLOPs of a large model are counted without memory",
    "_grouped_mm": "torch: the product of experts, whose FLOPs its counter does not know",
    "_get_raw": "torch: the FLOPs of a variable-length call follow from its bounds; by default a formula gets shapes",
    "_forward_hooks": "torch: the decoder's stand-in and the LM head run without the hooks of the pass around them",
    "_forward_pre_hooks": "torch: the same",
    "_last_lr": "torch: a schedule that was loaded gets the learning rate of this launch",
    "_foreach_lerp_": "torch: averaged weights are updated in a few launches, not in one a weight",
    "_foreach_copy_": "torch: the same",
    "_flash_attention_forward": "torch: what `varlen_attn` calls; it keeps gathered keys, and is slower to call",
    "_flash_attention_backward": "torch: the same",
    "_get_embed_scale": "peft: the factor of an embedding that scales itself, for its trained rows",
    "_reset_state": "accelerate: a run from Python leaves the process as it was before",
    "_typed_parameters": "submitit: which options of a job it names itself, without the prefix `slurm_`",
    "_ArgumentGroup": "argparse: the type of a group of flags",
    "_SubParsersAction": "argparse: the type of the list of commands, for completion",
    "_action_groups": "argparse: a group of flags is added to by its title",
    "_actions": "argparse: all flags of a parser, for completion, suggestions and checks",
    "_option_string_actions": "argparse: the same by their names",
}
"""Private names of other libraries, each with what it is for; a missing one is an error where it is used."""


def check_transformers() -> None:
    """Raise a ``UserError`` if the installed transformers lacks a private part, or has one with other parameters."""
    for part in PARTS:
        if (fault := part.fault()) is not None:
            oldest, newest = KNOWN_TO_WORK
            raise UserError(
                f"transformers {transformers.__version__} is not known to work with this version of stepjepa: {fault}; "
                f"install one from {oldest} to {newest}, as in: pip install 'transformers=={newest}'"
            )


def table() -> str:
    """Return both lists as a Markdown table, for the documents."""
    lines = ["| library | private part | what it is for |", "|---|---|---|"]
    for part in PARTS:
        library, owner = part.owner.split(":") if ":" in part.owner else (part.owner, "")
        name = f"{owner}.{part.name}" if owner else part.name
        lines.append(f"| {library.partition('.')[0]} | `{name}`, {part.use} | {part.reason} |")
    for name, reason in OTHER_LIBRARIES.items():
        library, _, use = reason.partition(": ") if not name.startswith("torch.") else ("torch", "", reason)
        lines.append(f"| {library} | `{name}` | {use} |")
    return "\n".join(lines)
