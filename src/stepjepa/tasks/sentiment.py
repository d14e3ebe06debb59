"""Sentiment of reviews: Rotten Tomatoes with two labels, Yelp with five."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from stepjepa.base.json_object import JsonObject
from stepjepa.data.record import Record
from stepjepa.tasks.answers import answer_start, text_scores
from stepjepa.tasks.base import NO_ANSWER, WRONG, Response, Scored, Task, record_error, right_answer
from stepjepa.tasks.raw_values import chat_record, read_label_field, read_text_field

# Labels from one star to five; Rotten Tomatoes has two of them.
STARS = ("Very Bad", "Bad", "Mediocre", "Good", "Very Good")
_SIDES = {"Very Bad": -1, "Bad": -1, "Mediocre": 0, "Good": 1, "Very Good": 1}
# The words of the prompt are no labels, but have a polarity.
_SIDES |= {"Negative": -1, "Neutral": 0, "Positive": 1}

_NAME = r"(?P<name>very\s+bad|very\s+good|bad|good|mediocre|negative|neutral|positive)(?![\w'-])"
_NAMED = re.compile(rf"(?<![\w'-]){_NAME}", re.IGNORECASE)
_FIRST = re.compile(rf"[\W_]*{_NAME}", re.IGNORECASE)
# "The sentiment of the comment is: Good", "It's a good film"; not "I do not think it is good".
_PHRASE = re.compile(rf"(?!.*\bnot\b)[\w\s]{{1,80}}?(?:\bis|'s|:)(?:\s+an?\b)?[\W_]*{_NAME}", re.IGNORECASE)


def read_label(text: str) -> str | None:
    """Return the label that an answer gives, one of :data:`STARS` or Negative, Neutral, Positive; else None.

    The first line must begin with it, in any case, or with a phrase that ends in ``is``; that line must not name
    another label. Later lines (the model did not stop) are ignored.
    """
    line = answer_start(text)
    start = _FIRST.match(line) or _PHRASE.match(line)
    if start is None:
        return None
    labels = {_label(match) for match in _NAMED.finditer(line)}
    stars = labels.intersection(STARS)
    if len(stars) > 1 or len({_SIDES[name] for name in labels}) > 1:
        return None
    return next(iter(stars), _label(start))


def _label(match: re.Match[str]) -> str:
    return " ".join(match["name"].split()).title()


class SentimentTask(Task):
    """The truth is a label: Good or Bad (``rotten_tomatoes``), or one of five from Very Bad to Very Good (``yelp``).

    ``correct`` is by :func:`read_label`; ``polarity``: the label has the true polarity, also in the words of the prompt
    (Positive); ``first_word``: the label is the first word, in any case; ``prefix``: the first letters, as in Goodness.
    """

    name = "sentiment"
    headline = "correct"
    secondary_score = "first_word"
    system_prompt = "Determine whether the comment is positive or negative"
    file_names = ("rotten_tomatoes", "yelp")

    def truth(self, record: Record) -> str:
        label = right_answer(record).strip()
        if label not in STARS:
            fault = f"the assistant message is {record.answer[:40]!r}, expected {', '.join(STARS)}"
            raise record_error(record, f"{fault}; for other labels pass `task generic`")
        return label

    def score(self, record: Record, response: Response) -> Scored:
        truth, label = self.truth(record), read_label(response.content)
        texts = text_scores(response.content, truth)
        first = _FIRST.match(answer_start(response.content))
        scores: dict[str, bool | float] = {
            "correct": label == truth,
            "exact": texts["exact"],
            "first_word": first is not None and _label(first) == truth,
            "prefix": texts["prefix"],
            "polarity": label is not None and _SIDES[label] == _SIDES[truth],
        }
        error = None if scores["correct"] else WRONG if label else NO_ANSWER
        return Scored(scores, {"truth": truth, "answer": label}, error)

    def details(self, lines: Sequence[JsonObject]) -> JsonObject:
        """Return ``balanced_accuracy``, the mean of the recalls; ``recall`` and ``count`` of every class that occurs.

        ``confusion`` counts the given labels for each true label, with ``other`` for labels that never occur as truth.
        """
        pairs = [(line["extracted"]["truth"], line["extracted"]["answer"]) for line in lines]
        truths = Counter(truth for truth, _ in pairs)
        classes = [label for label in STARS if label in truths]
        table = Counter((truth, answer if answer in classes else "other") for truth, answer in pairs)
        recall = {truth: table[truth, truth] / truths[truth] for truth in classes}
        return {
            "balanced_accuracy": math.fsum(recall.values()) / len(recall),
            "recall": recall,
            "count": {truth: truths[truth] for truth in classes},
            "confusion": {truth: {answer: table[truth, answer] for answer in (*classes, "other")} for truth in classes},
        }

    @classmethod
    def convert(cls, row: Mapping[str, object], *, stars: bool = False) -> JsonObject:
        """Convert a row with ``text`` and ``label`` (0 or 1 for Bad and Good) to a record in the published form.

        With ``stars`` (``yelp_review_full``) the labels are 0 to 4, one star to five.
        """
        labels = STARS if stars else ("Bad", "Good")
        text = read_text_field(row, "text").strip()
        return chat_record(cls.system_prompt, text, labels[read_label_field(row, len(labels))])
