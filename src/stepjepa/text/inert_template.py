"""Whether a chat template does nothing with contents but write them: then it need not be run for every record.

Such a template writes the same text around the contents of any chat with the same roles. That can't be learnt from
samples, since a template may look for any words in a content; so its syntax tree is followed instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import Environment, nodes
from jinja2.exceptions import TemplateSyntaxError

# Every content is a string, which answers these.
_ANSWERED_FOR_STRINGS = {"string", "defined", "undefined", "none", "mapping", "iterable", "sequence"}

# Strings trimmed at their ends stay what they are otherwise.
_TRIMMING_CALLS = {("strip",), ("lstrip",), ("rstrip",), ("lstrip", "\n")}

_COUNTS = (nodes.Filter, nodes.Getattr)

# What is written in these does not go straight to the text.
_CAPTURING = (nodes.AssignBlock, nodes.FilterBlock, nodes.CallBlock, nodes.Macro)

# What could bring in a text that is not looked at here.
_FOREIGN = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block, nodes.ScopedEvalContextModifier)


def writes_contents_only(source: str) -> bool:
    """Whether the text around the contents depends on nothing but the roles, whatever the contents are if not blank.

    Contents may be trimmed at their ends. The answer is "no" for anything that is not understood, among it every
    template that looks for words in a content or calls a macro with it.

    Args:
        source: a Jinja chat template over ``messages``, each with a ``role`` and a ``content``.
    """
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(source)
    except TemplateSyntaxError:
        return False
    return _Walk(tree).passed


class _Walk:
    """Follows messages and their contents through a syntax tree, from every place where they are read."""

    def __init__(self, tree: nodes.Template) -> None:
        self._above: dict[int, nodes.Node] = {}
        self._nodes = list(self._index(tree))
        # Names that may hold messages or one message, and names that may hold a content.
        self._messages, self._contents = {"messages"}, set[str]()
        known = -1
        self.passed = not any(isinstance(node, _FOREIGN) for node in self._nodes)
        while self.passed and known < len(self._messages) + len(self._contents):
            known = len(self._messages) + len(self._contents)
            self.passed = all(self._name_passes(node) for node in self._nodes if isinstance(node, nodes.Name))

    def _index(self, node: nodes.Node) -> Iterator[nodes.Node]:
        yield node
        for child in node.iter_child_nodes():
            self._above[id(child)] = node
            yield from self._index(child)

    def _name_passes(self, node: nodes.Name) -> bool:
        if node.ctx != "load":
            return True
        # A name that holds now this, now that, must pass as both.
        return (node.name not in self._messages or self._holder_passes(node)) and (
            node.name not in self._contents or self._content_passes(node)
        )

    def _holder_passes(self, node: nodes.Node) -> bool:
        """The messages or one of them: nothing but looked up, counted, gone through or given a name."""
        above = self._above[id(node)]
        passes = False
        if isinstance(above, nodes.Getattr):
            passes = self._field_passes(above, above.attr)
        elif isinstance(above, nodes.Getitem) and above.node is node:
            if isinstance(above.arg, nodes.Const) and isinstance(above.arg.value, str):
                passes = self._field_passes(above, above.arg.value)
            else:
                passes = self._is_place(above.arg) and self._holder_passes(above)
        elif isinstance(above, nodes.Filter):
            passes = above.node is node and above.name in ("length", "count") and not above.args
        elif isinstance(above, nodes.Test):
            passes = above.node is node and above.name in ("defined", "undefined", "none")
        elif isinstance(above, nodes.Operand):
            # Which fields there are is known.
            compared = self._above[id(above)]
            named = isinstance(compared, nodes.Compare) and isinstance(compared.expr, nodes.Const)
            passes = named and above.op in ("in", "notin")
        elif isinstance(above, nodes.For) and above.iter is node:
            passes = self._is_plain_loop(above) and self._name(above.target, self._messages)
        elif isinstance(above, nodes.Assign):
            passes = self._name(above.target, self._messages)
        return passes

    def _field_passes(self, node: nodes.Node, field: str) -> bool:
        if field == "content":
            return self._content_passes(node)
        # Methods of dicts and lists give away what the fields are; other fields our messages do not have, or roles.
        return not hasattr(dict, field) and not hasattr(list, field)

    def _content_passes(self, node: nodes.Node, *, whole: bool = True) -> bool:
        """A content: nothing but trimmed, joined to other text, given a name, asked whether it is empty, or written.

        Args:
            node: the expression.
            whole: it is a content alone, with nothing joined to it.
        """
        above = self._above[id(node)]
        passes = False
        if isinstance(above, nodes.Test):
            passes = whole and above.node is node and above.name in _ANSWERED_FOR_STRINGS
        elif isinstance(above, nodes.Filter):
            trims = above.node is node and above.name == "trim" and not above.args and not above.kwargs
            passes = whole and trims and self._content_passes(above)
        elif isinstance(above, nodes.Getattr):
            call = self._above[id(above)]
            passes = whole and self._is_trimming(call, above) and self._content_passes(call)
        elif isinstance(above, nodes.Not) or (isinstance(above, nodes.If | nodes.CondExpr) and above.test is node):
            passes = True
        elif isinstance(above, nodes.Add | nodes.Concat | nodes.And | nodes.Or | nodes.CondExpr):
            passes = self._content_passes(above, whole=False)
        elif isinstance(above, nodes.Assign):
            passes = whole and self._name(above.target, self._contents)
        elif isinstance(above, nodes.Output):
            passes = not self._is_captured(above)
        return passes

    def _is_trimming(self, call: nodes.Node, method: nodes.Getattr) -> bool:
        if not isinstance(call, nodes.Call) or call.node is not method or call.kwargs or call.dyn_args:
            return False
        if call.dyn_kwargs or not all(isinstance(argument, nodes.Const) for argument in call.args):
            return False
        return (method.attr, *(argument.value for argument in call.args)) in _TRIMMING_CALLS  # type: ignore[attr-defined]

    def _is_place(self, argument: nodes.Node) -> bool:
        """An index or a slice made of numbers, counts and loop indices."""
        numbers = (nodes.Const, nodes.Slice, nodes.Add, nodes.Sub, nodes.Neg, nodes.Name, nodes.Getattr, nodes.Filter)
        parts = [argument, *argument.find_all(nodes.Node)]
        if not all(isinstance(part, numbers) for part in parts):
            return False
        for part in parts:
            if isinstance(part, nodes.Const) and not isinstance(part.value, int | None):
                return False
            if isinstance(part, nodes.Getattr) and part.attr not in ("index", "index0", "length"):
                return False
            if isinstance(part, nodes.Filter) and part.name not in ("length", "count"):
                return False
            # A name by itself could be a field's: only messages that are counted and numbers of the loop are known.
            if isinstance(part, nodes.Name) and (
                part.name not in self._messages | {"loop"} or not isinstance(self._above[id(part)], _COUNTS)
            ):
                return False
        return True

    def _is_plain_loop(self, loop: nodes.For) -> bool:
        """Its variable ``loop`` gives away no message, and it picks none."""
        shown = {"first", "last", "index", "index0", "revindex", "revindex0", "length", "depth", "depth0"}
        if loop.test is not None or loop.recursive:
            return False
        for name in loop.find_all(nodes.Name):
            if name.name == "loop":
                above = self._above[id(name)]
                if not (isinstance(above, nodes.Getattr) and above.attr in shown):
                    return False
        return True

    def _is_captured(self, node: nodes.Node) -> bool:
        above: nodes.Node | None = node
        while above is not None:
            if isinstance(above, _CAPTURING):
                return True
            above = self._above.get(id(above))
        return False

    @staticmethod
    def _name(target: nodes.Node, names: set[str]) -> bool:
        """Note that a name holds something; no other target is followed."""
        if not isinstance(target, nodes.Name) or target.name == "loop":
            return False
        names.add(target.name)
        return True
