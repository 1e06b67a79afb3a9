"""Packages of the wheel; everything else about it is in pyproject.toml.

conf/ lies at the top of a checkout and is installed as harness/conf, which packages that
setuptools finds by itself cannot express.
"""

from setuptools import find_namespace_packages, setup

CODE = ["collectors*", "harness*", "hydra_plugins*", "sync*"]

setup(
    packages=[*find_namespace_packages(include=CODE, exclude=["*__pycache__*"]), "harness.conf"],
    package_dir={"harness.conf": "conf"},
    package_data={
        "": ["py.typed"],
        "harness.report": ["*.jinja", "presets/*.yaml"],
        "harness.conf": ["**/*.yaml"],
    },
)
