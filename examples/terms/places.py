"""Positions of the tokens of a micro-batch, for the terms of this folder."""

import numpy as np
import torch
from torch import Tensor

from stepjepa import Batch, hash_tokens


def next_tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """Positions ``[N]`` of all tokens of the texts that have a next one, and ``[N]`` of that next one.

    The path of a text through the tree says which position comes next.
    """
    paths = [np.empty(0, np.int64), *batch.records.paths]
    device = batch.label_ids.device
    now, following = (np.concatenate(each) for each in ([path[:-1] for path in paths], [path[1:] for path in paths]))
    return torch.from_numpy(now).to(device), torch.from_numpy(following).to(device)


def answers(batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Return the last prompt position of each text with a label, ``[records]``, and the positions of its answer."""
    infos, device = batch.records, batch.label_ids.device
    # The answer begins behind the first token that has a label.
    firsts = [(path, int(labels[0])) for path, labels in zip(infos.paths, infos.labels, strict=True) if len(labels)]
    ends = torch.tensor([path[first] for path, first in firsts], dtype=torch.long)
    answer_positions = [torch.from_numpy(path[first + 1 :]).to(device) for path, first in firsts]
    return ends.to(device), answer_positions


def question_and_answer_keys(batch: Batch) -> Tensor:
    """``[records, 2]`` hashes of the tokens of each text's prompt and of its answer; only of texts with a label."""
    ids, members = batch.token_ids.cpu().numpy(), batch.records
    cut = [
        (path, int(labels[0]) + 1) for path, labels in zip(members.paths, members.labels, strict=True) if len(labels)
    ]
    keys = [[hash_tokens(ids[path[:first]]), hash_tokens(ids[path[first:]])] for path, first in cut]
    return torch.tensor(keys, dtype=torch.long).reshape(-1, 2)
