"""Work counted by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from stepjepa.compute.work import Work, WorkCounter


def test_products_moves_and_calls_by_hand() -> None:
    first, second = torch.ones(3, 5), torch.ones(5, 7)
    with WorkCounter() as counter:
        product = first @ second
        assert counter.work == Work(products=2 * 3 * 5 * 7, calls=1)
        product.t()[2:]
        assert counter.work.calls == 1, "views cost nothing"
        product + product
    # Two operands read, one result written.
    assert counter.work == Work(products=2 * 3 * 5 * 7, moved=3 * 3 * 7 * 4, calls=2)


def test_a_lookup_reads_what_it_finds_and_an_expanded_tensor_lies_in_memory_once() -> None:
    table, ids = torch.ones(101, 7), torch.tensor([5, 11, 13])
    with WorkCounter() as counter:
        F.embedding(ids, table)
    assert counter.work == Work(moved=2 * 3 * 7 * 4, calls=1)
    wide = torch.ones(1, 7).expand(11, 7)
    with WorkCounter() as counter:
        wide + 1.0
    assert counter.work == Work(moved=7 * 4 + 11 * 7 * 4, calls=1)


def test_attention_in_one_kernel_is_counted_apart_forward_and_backward() -> None:
    values = torch.ones(2, 3, 7, 5, requires_grad=True)
    with WorkCounter() as counter:
        F.scaled_dot_product_attention(values, values, values, is_causal=True).sum().backward()
    square = 2 * 2 * 3 * 7 * 7 * 5
    # Scores and their sum of values; the scores again and two gradients of each product.
    assert counter.work.attention == 2 * square + 5 * square
    assert counter.work.products == 0


def test_shapes_alone_say_the_same() -> None:
    def work() -> Work:
        with WorkCounter() as counter:
            first = torch.ones(3, 5, requires_grad=True)
            (first @ torch.ones(5, 7)).relu().sum().backward()
        return counter.work

    real = work()
    with FakeTensorMode():
        assert work() == real


def test_work_adds_up() -> None:
    assert Work(1, 2, 3, 5) + Work(7, 11, 13, 17) == Work(8, 13, 16, 22)
