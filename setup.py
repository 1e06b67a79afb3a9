"""Packages of the wheel; everything else about it is in pyproject.toml.

conf/ lies at the top of a checkout and is installed as harness/conf, which packages that
setuptools finds by itself cannot express.
"""

from setuptools import find_namespace_packages, setup

CODE = ["collectors*", "harness*", "hydra_plugins*", "lockstep_*", "sync*"]
CONF = ["harness.conf", *(f"harness.conf.{name}" for name in find_namespace_packages("conf"))]

setup(
    packages=[*find_namespace_packages(include=CODE, exclude=["*__pycache__*"]), *CONF],
    package_dir={"harness.conf": "conf"},
    package_data={"": ["py.typed", "*.jinja", "*.yaml"]},
)
