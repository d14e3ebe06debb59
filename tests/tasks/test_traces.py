"""Model-written solutions of GSM8K: our verdicts beside those that were published with them."""

import json

from stepjepa.data.records import parse_record
from stepjepa.tasks.base import Response
from stepjepa.tasks.gsm8k import Gsm8kTask


def test_verdicts_on_real_solutions_and_where_they_differ(shared_data):
    text = (shared_data / "traces" / "star_repo_star.detailed_results.json").read_text(encoding="utf-8")
    found = json.loads(text)
    rows = found if isinstance(found, list) else next(value for value in found.values() if isinstance(value, list))
    assert len(rows) == 1319
    task = Gsm8kTask(last_number=True)
    strict, unmarked, lenient = [], 0, []
    for index, row in enumerate(rows):
        truth = f"so\n#### {row['correct_answer']}"
        chat = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": truth}]
        scores = task.score(parse_record({"messages": chat}), Response(row["full_response"])).scores
        if scores["correct"] != row["is_correct"]:
            strict.append(index)
            unmarked += not scores["answered"]
        if scores["last_number_correct"] != row["is_correct"]:
            lenient.append(index)
    # All but one of the strict differences mark no answer at all.
    assert (len(strict), unmarked) == (90, 89)
    # One gives no answer and was called right; one says 16, as it should, and was read as 100; one marks the right 2.
    assert lenient == [504, 899, 1199]
