"""Your own step splitter: responses whose steps no blank line and no number marks. Offline, on a CPU.

Step-JEPA needs to know where one step ends and the next begins. 'stepjepa prepare steps' finds blank lines, "Step 2:"
and "2."; here the responses are one paragraph each, and a step begins with "Next," or "Finally,". The splitter is the
one function in sentence_steps.py: response in, list of steps out.

What you should see: without the splitter every response is left out, for it has fewer than two steps; with it all are
kept; 'inspect' shows which tokens are step 1 and step 2 of the first record and which predicts which; a short training
runs on them. What it does not show: that these are good steps, or what they do to accuracy.

Every line that starts with ``$`` is a command that you can run yourself.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

from shown import TINY, arguments, command, write_jsonl


def responses(count: int, seed: int = 82) -> Iterator[dict[str, str]]:
    """Raw rows as a reasoning model leaves them: a question, and a response in one paragraph."""
    draw = random.Random(seed)
    for _ in range(count):
        boxes, pens, sold = draw.randint(2, 9), draw.randint(2, 9), draw.randint(1, 3)
        yield {
            "question": f"A shop has {boxes} boxes of {pens} pens and sells {sold} pens. How many are left?",
            "response": f"First, {boxes} boxes of {pens} make {boxes * pens} pens. Next, {sold} are sold, which leaves "
            f"{boxes * pens - sold}. Finally, the answer is \\boxed{{{boxes * pens - sold}}}.",
        }


def run(folder: Path, *, tiny: bool = False) -> None:
    """Write responses, prepare them without the splitter and with it, look at a record, train."""
    write_jsonl(folder / "responses.jsonl", responses(8 if tiny else 400))
    prepare = (
        f"prepare steps --input_file {folder}/responses.jsonl --response_field response "
        f"--output_file {folder}/train.jsonl"
    )
    print("Without a splitter of its own: nothing is kept, which is exit code 2.")
    command(prepare, expected=2)
    # Where this file and the splitter lie. In a folder where you start 'stepjepa' yourself it is found without.
    here = Path(os.path.relpath(Path(__file__).parent))
    command(f"{prepare} --custom sentence_steps:split", path=here)
    command(f"inspect --step_jepa --train_file {folder}/train.jsonl --model_name preset:tiny")
    command(
        f"train --train_file {folder}/train.jsonl --output_dir {folder}/step-jepa --model_name preset:tiny --step_jepa "
        "--jepa_loss_type infonce --batch_size 8 --grad_accum 1 --learning_rate 3e-3 --logging_steps 10 "
        f"--save_strategy no {TINY if tiny else ''}"
    )


if __name__ == "__main__":
    args = arguments(__doc__, "own-splitter")
    run(args.output_dir, tiny=args.tiny)
