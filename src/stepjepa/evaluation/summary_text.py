"""Format the summary of an evaluation as text: the most important figures first, each with its unit."""

from collections.abc import Iterator, Mapping, Sequence

from stepjepa.base.counting import counted
from stepjepa.base.json_object import JsonObject

MAPS = {"linear_map": ("a linear map", "the map"), "projection_heads": ("projection heads", "the heads")}
"""Maps of embeddings behind which retrieval is measured, too: name in a summary -> in words, where it is mentioned
first and where it is again."""

_DIRECTIONS = "directions (effective rank)"

# Figure of ``similarity`` -> its name, and a format with its unit.
_EMBEDDINGS = {
    "matched_similarity": ("cosine of matched views", "{:.4f}, mean"),
    "shuffled_similarity": ("cosine of shuffled views", "{:.4f}, mean"),
    "source_rank": ("source embeddings span", f"{{:.1f}} {_DIRECTIONS}"),
    "target_rank": ("target embeddings span", f"{{:.1f}} {_DIRECTIONS}"),
    "source_rank_centred": ("source embeddings minus their mean span", f"{{:.1f}} {_DIRECTIONS}"),
    "target_rank_centred": ("target embeddings minus their mean span", f"{{:.1f}} {_DIRECTIONS}"),
    "retrieval_top1": ("sources whose nearest target is their own", "{:.1%}"),
}

# Metric of ``retrieval`` -> its name; hits at 1 are shown first of all.
_RETRIEVAL = {
    "hits_at_10": "a right answer is among the ten nearest",
    "mrr": "mean reciprocal rank of the nearest right answer",
    "ndcg_at_10": "nDCG at 10",
}

# Headline score of a task -> what it counts as right.
_SCORES = {
    "exact": "exact match",
    "equivalent": "equivalent expressions",
    "execution": "equal results of the query",
    "correct": "correct answer",
    "reference": "the published rule",
    "majority": "the majority of the samples",
}


def format_summary(summary: JsonObject, *, details: bool = False) -> str:
    """Format a summary for a terminal.

    Args:
        summary: the content of ``NAME.summary.json``.
        details: add every other figure: all scores with their intervals, embeddings, tokens, seconds.

    Returns:
        Lines: the headline score with its interval, the share that stopped, wrong answers by kind, skipped records,
        answers that could have been learnt by heart, and what was evaluated.
    """
    lines = [*_headline(summary)]
    if details:
        lines += [f"  {line}" for line in _details(summary)]
    return "\n".join(lines)


def score_words(name: str) -> str:
    """Return the meaning of a score in words; the name of a custom task's score unchanged."""
    return _SCORES.get(name, name)


def describe_readout(readout: Mapping[str, object]) -> str:
    """Describe where embeddings are read: the mode of the views, the layer, the pooling."""
    return _plain(readout)


def describe_trained_on(shares: Mapping[str, float] | None) -> str | None:
    """Describe the share of test prompts that was trained on (see ``store.prompts``); None if zero or unknown."""
    if not shares or not shares["normalised"]:
        return None
    exact, others = shares["exact"], shares["normalised"]
    return f"{exact:.1%} of the test prompts were trained on ({others:.1%} but for case and blanks)"


def _headline(summary: JsonObject) -> Iterator[str]:
    """Yield the most important lines: scores, causes of errors, retrieval, the evaluated model and file."""
    scores, n, headline = summary["scores"], summary["n"], summary["headline"]
    # With several samples the error is that of the majority answer.
    decided = "majority" if "majority" in scores else headline
    for name in dict.fromkeys((headline, decided)):
        yield f"{'' if scores[name]['low'] is None else 'right by '}{score_words(name)}: {_score(scores[name], n)}"
    if "stopped" in scores:
        yield f"stopped by itself: {scores['stopped']['mean']:.1%} of the answers"
    if summary["errors"]:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in summary["errors"].items())
        wrong = f"{sum(summary['errors'].values()):,} of {counted(n, 'example')} ({kinds})"
        yield f"wrong by {score_words(decided)}: {wrong}"
    if summary["left_out"]:
        yield f"skipped: {counted(sum(summary['left_out'].values()), 'record')}: {_counts(summary['left_out'])}"
    similarity = summary.get("similarity") or {}
    if "matched_similarity" in similarity:
        shuffled = similarity.get("shuffled_similarity")
        other = "" if shuffled is None else f", of shuffled ones {shuffled:.3f}"
        views = "steps" if (summary.get("settings") or {}).get("similarity") == "step-jepa" else "views"
        yield f"mean cosine of matched {views}: {similarity['matched_similarity']:.3f}{other}"
    if retrieval := summary.get("retrieval"):
        of_steps = retrieval.get("readout", {}).get("views") == "step-jepa"
        query, target = ("step", "next step") if of_steps else ("question", "answer")
        hits = _score(retrieval["hits_at_1"], retrieval["queries"], query)
        yield f"nearest {target} is right by embeddings: {hits}, among {retrieval['candidates']:,} distinct {target}s"
        for name, (words, _) in MAPS.items():
            if mapped := retrieval.get(name):
                fitted = f"{words}, fitted on {counted(mapped['records'], 'record')} of {mapped['file']}"
                hits = _score(mapped["hits_at_1"], mapped["queries"], query)
                yield f"the same behind {fitted}: {hits}"
        if without := retrieval.get("without_pair"):
            yield f"not among these questions: {without}"
    if overlap := describe_trained_on(summary.get("trained_on")):
        yield overlap
    if summary.get("not_measured"):
        yield f"not measured: {summary['not_measured']}"
    model = f", model {summary['model_path']}" if summary.get("model_path") else ""
    if summary.get("server"):
        model = f", model {summary['settings']['server_model']} at {summary['server']}"
    yield f"evaluated: {counted(n, 'example')} of {summary['test_file']}, task {summary['task']}{model}"


def _details(summary: JsonObject) -> Iterator[str]:
    """Yield the lines that ``--details`` adds: every score, and the further figures of the task."""
    n = summary["n"]
    for name, score in summary["scores"].items():
        yield f"{'stopped by itself' if name == 'stopped' else name}: {_score(score, n)}"
    for name, value in summary["details"].items():
        if value not in ({}, None):
            yield f"{name.replace('_', ' ')}: {_nested(value)}"
    similarity = summary.get("similarity") or {}
    if pairs := similarity.get("pairs"):
        yield f"pairs of views: {pairs:.0f}"
    for name, (label, pattern) in _EMBEDDINGS.items():
        if similarity.get(name) is not None:
            yield f"{label}: {pattern.format(similarity[name])}"
    if ranked := similarity.get("rank_pairs"):
        yield f"directions and nearest targets are of the last {counted(ranked, 'pair')}"
    for side in ("right", "wrong"):
        if (cosines := similarity.get(side) or {}).get("n"):
            yield f"cosine of matched views where the answer is {side}: {_spread(cosines)}"
    retrieval = summary.get("retrieval") or {}
    yield from _retrieval(retrieval)
    yield from _linear_map(retrieval.get("linear_map"))
    yield from _projection_heads(retrieval.get("projection_heads"))
    if summary.get("gold_loss") is not None:
        tokens = counted(summary["gold_tokens"], "token")
        yield f"LM loss on right answers: {summary['gold_loss']:.4f} nats a token, over {tokens}"
    if summary.get("generated_tokens") is not None:
        yield f"generated: {counted(summary['generated_tokens'], 'token')}"
    if summary.get("generated_now") and summary.get("seconds"):
        speed = summary.get("tokens_per_second")
        rate = "" if speed is None else f", {speed:,.1f} tokens a second"
        yield f"time: {counted(summary['generated_now'], 'example')} in {summary['seconds']:.1f} s{rate}"


def _retrieval(retrieval: JsonObject) -> Iterator[str]:
    for name, label in _RETRIEVAL.items():
        if score := retrieval.get(name):
            yield f"{label}: {score['mean']:.4f} (95% interval {score['low']:.4f} to {score['high']:.4f})"
    if of_text := retrieval.get("equal_text_only"):
        yield f"nearest answer is the right one in the same words: {of_text['hits_at_1']:.1%}"
    if readout := retrieval.get("readout"):
        yield f"embeddings of retrieval are read at: {describe_readout(readout)}"


def _linear_map(mapped: JsonObject | None) -> Iterator[str]:
    """Yield the figures of retrieval behind a linear map, if there is one, and how it was fitted."""
    if mapped is None:
        return
    yield from (f"behind the linear map, {line}" for line in _retrieval(mapped))
    # A summary of an earlier version, which knew no other fit, names none.
    yield f"fit of the linear map: {mapped.get('fit') or 'ridge'}, penalty {mapped['penalty']:g}"
    if left_out := mapped["left_out"]:
        yield f"not used for the linear map: {counted(left_out, 'record')} whose question is in the test file"


def _projection_heads(mapped: JsonObject | None) -> Iterator[str]:
    """Yield the figures of retrieval behind projection heads, if there are any, and how long they were trained."""
    if mapped is not None:
        yield from (f"behind the projection heads, {line}" for line in _retrieval(mapped))
        epochs = counted(mapped["epochs"], "epoch")
        yield f"training of the projection heads: {epochs}, chosen by records that they are not trained on"


def _score(score: JsonObject, n: int, noun: str = "example") -> str:
    if score["low"] is None:
        return f"{score['mean']:.4f}, mean over {counted(n, noun)}"
    interval = f"95% interval {100 * score['low']:.1f} to {100 * score['high']:.1f}%"
    return f"{score['mean']:.1%} of {counted(n, noun)} ({interval})"


def _spread(cosines: JsonObject) -> str:
    quantiles = ", ".join(f"{float(share):.0%} {value:.3f}" for share, value in cosines["quantiles"].items())
    over = counted(cosines["n"], "example")
    return f"mean {cosines['mean']:.3f}, standard deviation {cosines['std']:.3f} over {over}; quantiles {quantiles}"


def _counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in numbers.items())


def _nested(value: object) -> str:
    """Format a figure of a task: whole numbers count examples, others are shares or means, as their name says."""
    unit = "examples: " if isinstance(value, Mapping) and all(isinstance(leaf, int) for leaf in _leaves(value)) else ""
    return unit + (counted(value, "example") if isinstance(value, int) else _plain(value))


def _leaves(value: object) -> list[object]:
    parts: Sequence[object] = [*value.values()] if isinstance(value, Mapping) else []
    return [leaf for part in parts for leaf in _leaves(part)] if isinstance(value, Mapping) else [value]


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        nested = any(isinstance(item, Mapping) for item in value.values())
        parts = (f"{name} ({_plain(item)})" if nested else f"{name} {_plain(item)}" for name, item in value.items())
        return ", ".join(parts)
    return f"{value:.4f}" if isinstance(value, float) else str(value)
