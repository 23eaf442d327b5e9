"""What pyproject.toml cannot say: how the kernels are compiled, and that their wheel serves every Python from 3.10."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent))
from build_backend import EXTENSIONS, BuildKernels

setup(
    ext_modules=EXTENSIONS,
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
