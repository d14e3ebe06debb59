"""Where tokens of a micro-batch stand in its rows, for the terms of this folder."""

import numpy as np
import torch
from torch import Tensor

from stepjepa import Batch


def next_tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """Positions ``[N]`` of all tokens of the texts that have a next one, and ``[N]`` of that next one.

    The path of a text through the tree says which position comes next.
    """
    paths = [np.empty(0, np.int64), *batch["members"].paths]
    device = batch["label_ids"].device
    now, following = (np.concatenate(each) for each in ([path[:-1] for path in paths], [path[1:] for path in paths]))
    return torch.from_numpy(now).to(device), torch.from_numpy(following).to(device)


def answers(batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Of each text with a label the position ``[records]`` of the last token of the prompt, and those of its answer."""
    labelled = batch["head_index"][batch["label_row"]].cpu().numpy()
    device = batch["label_ids"].device
    paths = [path for path in batch["members"].paths if np.isin(path, labelled).any()]
    # The answer begins behind the first position that has a label.
    firsts = [int(np.isin(path, labelled).argmax()) for path in paths]
    ends = torch.tensor([path[first] for path, first in zip(paths, firsts, strict=True)], dtype=torch.long)
    found = [torch.from_numpy(path[first + 1 :]).to(device) for path, first in zip(paths, firsts, strict=True)]
    return ends.to(device), found
