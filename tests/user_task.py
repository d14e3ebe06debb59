"""A task of a user's own, as in docs/tasks.md: the answer is the last word."""

from stepjepa.tasks.base import Continuation, Response, Scored, Task


class LastWord(Task):
    """Right if the last word is."""

    name = "last-word"
    headline = "last"
    lenient = "anywhere"

    def truth(self, record):
        """The last word of the right answer."""
        return record.answer.split()[-1]

    def score(self, record, response):
        """Compare last words."""
        words = response.content.split()
        truth = self.truth(record)
        answer = words[-1] if words else None
        return Scored({"last": answer == truth, "anywhere": truth in words}, {"answer": answer})


class Weighing(LastWord):
    """Asks for likelihoods of two words, and says which was likelier."""

    def continuations(self, record):
        """A colour and a number."""
        return [Continuation("a", "Red"), Continuation("b", "4", context="2+2 is ")]

    def score(self, record, response: Response):
        """Adds how likely the words are."""
        scored = super().score(record, response)
        result = response.likelihoods
        return Scored({**scored.scores, "a_likelier": result["a"].log_probability > result["b"].log_probability})


class Choosy(LastWord):
    """Leaves out what has no number in its answer."""

    def left_out(self, record):
        """No number."""
        return None if any(map(str.isdigit, record.answer)) else "no number"
