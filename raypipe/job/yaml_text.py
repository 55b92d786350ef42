"""YAML as people mean it: ``1e-3`` is a number, and a key written twice is a mistake."""

from __future__ import annotations

import re

import yaml

from raypipe.errors import SpecError


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader plus two corrections."""

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


# YAML 1.1, which PyYAML follows, wants a dot in every float: 1e-3 would be a string.
_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str, where: str) -> object:
    """The plain data in a YAML text; raises SpecError with the line and column of a syntax error.

    >>> parse_yaml("{lr: 1e-3, clip: null}", "example")
    {'lr': 0.001, 'clip': None}
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        spot = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        raise SpecError(spot, f"not valid YAML: {error.problem or error.context}", "correct the line") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that no calendar has
        raise SpecError(where, f"not valid YAML: {error}", "correct the file") from None
