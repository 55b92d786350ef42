"""Parse YAML with two corrections: ``1e-3`` is a number, and a duplicate key is an error."""

from __future__ import annotations

import re

import yaml

from raypipe.errors import SpecError


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the two corrections and a limit on the expansion of aliases."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _check_size(node)  # before construction, since merge keys (<<) copy what they refer to
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # the safe loader refuses what can't be a key
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f'the key "{key.value}" is given twice', key.start_mark
                )
            seen.add(key.value)
        mapping: dict[object, object] = super().construct_mapping(node, deep)
        return mapping


# YAML 1.1, which PyYAML follows, requires a dot in every float, so 1e-3 would be a string.
_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)

MOST_VALUES = 100_000
"""Limit on the values of one text with aliases expanded: nested aliases can stand for more than any memory holds."""
DEEPEST = 50
"""Limit on the nesting of lists and mappings: several times what any key needs."""
TOO_DEEP = f"nested more than {DEEPEST} deep"


def parse_yaml(text: str, where: str) -> object:
    """Return the plain data in a YAML text; ``where`` names its origin in errors.

    Raises:
        SpecError: the text is not valid YAML; it names line and column of a syntax error.

    >>> parse_yaml("{lr: 1e-3, clip: null}", "example")
    {'lr': 0.001, 'clip': None}
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        spot = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        raise SpecError(spot, f"not valid YAML: {error.problem or error.context}", "correct the line") from None
    except RecursionError:
        raise SpecError(where, f"not valid YAML: {TOO_DEEP}", "correct the brackets") from None
    except Exception as error:  # PyYAML lets any error through, for example of an impossible date or a wrong !!bool
        why = str(error) if isinstance(error, (yaml.YAMLError, ValueError)) else "a value is not what its tag says"
        raise SpecError(where, f"not valid YAML: {why}", "correct the file") from None


def _check_size(root: yaml.Node) -> None:
    """Refuse more than ``MOST_VALUES`` values or ``DEEPEST`` levels, counted with aliases expanded."""
    sizes: dict[int, tuple[int, int] | None] = {}  # by identity: (values, levels); None while being counted
    todo = [root]
    while todo:
        node = todo[-1]
        inner = _inner(node)
        if id(node) not in sizes:
            sizes[id(node)] = None
            for child in inner:
                if id(child) not in sizes:
                    todo.append(child)
                elif sizes[id(child)] is None:
                    _refuse("an alias refers to a value that contains it", child)
            continue
        todo.pop()
        if isinstance(node, yaml.ScalarNode):
            node.value.encode()  # half a pair of surrogates is no character: writing or printing it would fail
        if sizes[id(node)] is None:
            found = [sizes[id(child)] or (0, 0) for child in inner]
            size, levels = 1 + sum(s for s, _ in found), 1 + max((depth for _, depth in found), default=0)
            if size > MOST_VALUES:
                _refuse(f"more than {MOST_VALUES} values with aliases expanded", node)
            if levels > DEEPEST:
                _refuse(TOO_DEEP, node)
            sizes[id(node)] = size, levels


def _inner(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _refuse(why: str, node: yaml.Node) -> None:
    raise yaml.constructor.ConstructorError(None, None, why, node.start_mark)
