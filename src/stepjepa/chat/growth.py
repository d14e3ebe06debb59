"""Recognise chat templates that only add text: the text of a chat begins with the text of the chat's beginning.

Such a template has one loop over the messages, looks at no later message while it writes one, and ends with a text that
depends on no message. This is derived from its syntax tree, so it holds for every chat. Qwen3's template is not of this
kind: it writes earlier turns in another way once a new question follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from jinja2 import nodes

if TYPE_CHECKING:
    from jinja2 import Environment, Template

MARK = "\ue002"
"""Mark in front of the text of each message, and behind that of the last one."""

_LOOP = {"index", "index0", "first", "previtem", "depth", "depth0"}  # attributes of `loop` that earlier messages decide


class _NotProvenError(Exception):
    """The template may look at later messages."""


def marked_template(environment: Environment, source: str) -> Template | None:
    """Return the template with a :data:`MARK` around the text of each message; None unless it only adds text."""
    tree = environment.parse(source)
    try:
        number = _main_loop(tree)
    except _NotProvenError:
        return None
    loop = cast(nodes.For, tree.body[number])
    loop.body.insert(0, _mark(environment))
    tree.body.insert(number + 1, _mark(environment))
    return environment.from_string(tree)


def _mark(environment: Environment) -> nodes.Output:
    output = nodes.Output([nodes.TemplateData(MARK)], lineno=1)
    output.set_environment(environment)
    return output.set_lineno(1)  # type: ignore[return-value]  # the node itself


def _main_loop(tree: nodes.Template) -> int:
    """Return the index of the loop over the messages among the parts of a template."""
    lists = _names_of_the_list(tree)
    loops = [n for n, node in enumerate(tree.body) if isinstance(node, nodes.For) and _is_list(node.iter, lists)]
    if len(loops) != 1:
        raise _NotProvenError
    (number,) = loops
    loop = cast(nodes.For, tree.body[number])
    if loop.test is not None or loop.else_ or loop.recursive or not isinstance(loop.target, nodes.Name):
        raise _NotProvenError
    for part, node in enumerate(tree.body):
        if part != number:
            _check(node, lists, in_loop=False)
    for node in loop.body:
        _check(node, lists, in_loop=True)
    # Variables that the loop changes must not affect the text behind it.
    changed = {reference.name for reference in loop.find_all(nodes.NSRef)}
    changed |= {variable.name for variable in loop.find_all(nodes.Name) if variable.ctx != "load"}
    changed |= {macro.name for macro in tree.find_all(nodes.Macro)}
    behind = {variable.name for node in tree.body[number + 1 :] for variable in node.find_all(nodes.Name)}
    if behind & (changed | lists):
        raise _NotProvenError
    return number


def _names_of_the_list(tree: nodes.Template) -> set[str]:
    """Return the names of the list of messages: ``messages``, and variables that are set to it or to its rest."""
    lists, count = {"messages"}, 0
    while len(lists) > count:
        count = len(lists)
        for assignment in tree.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name) and _is_list(assignment.node, lists):
                lists.add(assignment.target.name)
    return lists


def _is_list(node: nodes.Node, lists: set[str]) -> bool:
    """Return whether an expression is the list of messages, or the rest of it from a fixed place on."""
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        part = node.arg
        begins = part.start is None or (isinstance(part.start, nodes.Const) and part.start.value in (0, 1))
        return begins and part.stop is None and part.step is None and _is_list(node.node, lists)
    return isinstance(node, nodes.Name) and node.name in lists


def _is_decided(node: nodes.Node, lists: set[str], *, in_loop: bool) -> bool:
    """Return whether an expression reads the messages, or `loop`, and no later message can change it."""
    if isinstance(node, nodes.Getitem):
        first = isinstance(node.arg, nodes.Const) and node.arg.value == 0
        return first and isinstance(node.node, nodes.Name) and node.node.name in lists
    if isinstance(node, nodes.Filter):
        return node.name == "first" and isinstance(node.node, nodes.Name) and node.node.name in lists
    if isinstance(node, nodes.Test):
        return node.name in ("defined", "undefined") and isinstance(node.node, nodes.Name)
    if isinstance(node, nodes.Getattr):
        return in_loop and isinstance(node.node, nodes.Name) and node.node.name == "loop" and node.attr in _LOOP
    # Under another target, as an attribute of a namespace, the list would not be known again.
    is_named = isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name) and _is_list(node.node, lists)
    return is_named and not in_loop


def _check(node: nodes.Node, lists: set[str], *, in_loop: bool) -> None:
    """Raise if a node reads a message other than the first and, in the loop, the present one."""
    if isinstance(node, nodes.Include | nodes.Import | nodes.FromImport | nodes.Extends | nodes.Block | nodes.Break):
        raise _NotProvenError
    if _is_decided(node, lists, in_loop=in_loop):
        return
    if isinstance(node, nodes.Name) and (node.name in lists or (node.name == "loop" and in_loop)):
        raise _NotProvenError
    if isinstance(node, nodes.For):
        _check(node.iter, lists, in_loop=in_loop)
        # Inside another loop, `loop` is that one.
        for child in (node.target, *node.body, *node.else_, *([node.test] if node.test is not None else [])):
            _check(child, lists, in_loop=False)
        return
    for child in node.iter_child_nodes():
        _check(child, lists, in_loop=in_loop)
