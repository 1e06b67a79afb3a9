"""conf/: a file for each part, with values that are those of the part's options."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from harness.config.compose import BASES, CONF
from harness.files import flatten, parse_yaml
from harness.options.base import defaults
from harness.registry import Part, Registry, algorithms, collectors, loggers, models, schemes

PARTS = [
    (registry, part)
    for registry in (algorithms, collectors, schemes, models, loggers)
    for part in registry
    if part.options.__module__.startswith("harness.")
]


@pytest.mark.parametrize(
    ("registry", "part"), PARTS, ids=[f"{registry.group}={part.name}" for registry, part in PARTS]
)
def test_the_file_of_a_part_has_the_values_of_its_options(registry: Registry, part: Part):
    text = (CONF / registry.group / f"{part.name}.yaml").read_text()
    values = parse_yaml(text)
    assert values.pop("defaults") == [f"/{BASES}/{registry.group}/{part.name}@_here_", "_self_"]
    options = OmegaConf.create(defaults(part.options))
    for path, value in flatten(values, lists=False) if values else ():
        assert OmegaConf.select(options, path) == value, path
    header, *lines = text.splitlines()
    if registry.several:
        assert header == f"# @package {registry.group}.{part.name}"
        header = lines[0]
    assert header.startswith("# ")
    assert header.endswith(".")


def test_each_file_of_a_group_of_parts_is_of_a_part():
    named = {f"{registry.group}/{part.name}.yaml" for registry, part in PARTS}
    named |= {"sync/shared_copy.yaml"}  # shared_mem, as experiments compare it
    groups = {registry.group for registry, _ in PARTS}
    files = {file for group in groups for file in (CONF / group).iterdir()}
    assert {str(file.relative_to(CONF)) for file in files} == named
    assert all(yaml.safe_load(Path(file).read_text()) for file in files)
