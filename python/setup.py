"""What pyproject.toml cannot say: an installed package remembers the source tree, whose build folders have the library."""
import pathlib

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCE_TREE = pathlib.Path(__file__).resolve().parent.parent


class BuildPy(build_py):
    def run(self):
        super().run()
        if not getattr(self, "editable_mode", False):  # then the package lies in the source tree
            path = pathlib.Path(self.build_lib, "flashsteps", "_source_tree.py")
            path.write_text(f"SOURCE_TREE = {str(SOURCE_TREE)!r}\n", encoding="utf-8")


setup(cmdclass={"build_py": BuildPy})
