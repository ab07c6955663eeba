"""The documentation: links, paths, commands and flags exist, and its examples run."""

import doctest
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.conftest import CACHE, ROOT
from xe_retrieval.report import paper

PAGES = {p.relative_to(ROOT): p.read_text() for p in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
DEVELOPMENT = PAGES[pathlib.Path("docs/development.md")]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", DEVELOPMENT, re.S | re.M)
FOLDERS = ("xe_retrieval", "configs", "launch", "tests", "benchmarks", "docs")
FILES = [p.relative_to(ROOT) for folder in FOLDERS for p in (ROOT / folder).rglob("*.*")]
EXAMPLES = {m[1]: block for _, block in BLOCKS if (m := re.match(r"# ([\w/]+\.py)\n", block))}
OTHER_TOOLS = {"no-deps", "build-arg", "verbosity"}  # flags of pip, docker and absl
OTHER_TOOLS |= {"parallelism"}  # of the job server of Flink


@pytest.fixture(params=PAGES, ids=str)
def page(request):
  return request.param


def test_readme_is_short():
  assert len(PAGES[pathlib.Path("README.md")].splitlines()) <= 150


def test_links(page):
  for target in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGES[page]):
    name, _, anchor = target.partition("#")
    path = (ROOT / page).parent / name if name else ROOT / page
    assert path.exists(), f"{page}: {target}"
    headings = re.findall(r"^#+ (.*)", path.read_text(), re.M) if anchor else []
    slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
    assert not anchor or anchor in slugs, f"{page}: {target}"


def test_paths(page):
  """Paths from the root, and file names and `module.name`s in backticks."""
  text = PAGES[page]
  for path in re.findall(rf"(?<![\w/.:-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)", text):
    assert (ROOT / path).exists() or path in EXAMPLES, f"{page}: {path}"
  known = {path.name for path in FILES} | {pathlib.Path(name).name for name in EXAMPLES}
  for name in re.findall(r"`([\w/]+\.(?:py|sh|yaml))`", text):
    assert name.rpartition("/")[2] in known, f"{page}: {name}"
  fields = (ROOT / "configs" / "cc.py").read_text()  # `mesh.shard_parameters` is one
  for module, name in re.findall(r"`([a-z_]+)\.([A-Za-z_]+)[(`]", text):
    texts = [(ROOT / p).read_text() for p in FILES if p.name == f"{module}.py"]
    texts += [p.read_text() for p in ROOT.glob(f"xe_retrieval/{module}/__init__.py")]
    if texts and name not in ("html", "json", "md", "py", "tsv", "yaml"):
      found = any(re.search(rf"\b{name}\b", t) for t in (*texts, fields))
      assert found, f"{page}: {module}.{name}"


def flags_of(module):
  """Names that a command defines, by its source: importing all of them would take a minute."""
  path = ROOT / module.replace(".", "/")
  path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
  source = path.read_text()
  names = re.findall(r'DEFINE_\w+\(\s*"(\w+)"|add_argument\(\s*"--(\w+)"', source)
  return {absl or argparse for absl, argparse in names}


def flags_of_beam():
  """By its source, too; what follows -- in a command."""
  (package,) = importlib.util.find_spec("apache_beam").submodule_search_locations
  source = (pathlib.Path(package) / "options" / "pipeline_options.py").read_text()
  return set(re.findall(r"""['"]--(\w+)['"]""", source)) | OTHER_TOOLS


def test_commands(page):
  text = PAGES[page].replace("\\\n", " ")
  for module, rest in re.findall(r"python -m ((?:xe_retrieval|benchmarks)\.\w+)([^\n`]*)", text):
    rest, _, beam = rest.partition(" -- ")
    given, given_beam = (set(re.findall(r"(?<!\w)--(\w+)", part)) for part in (rest, beam))
    assert not given_beam or given_beam <= flags_of_beam(), f"{page}: {given_beam}"
    assert given <= flags_of(module), f"{page}: {module} {given - flags_of(module)}"


def test_flags_in_prose(page):
  known = set(OTHER_TOOLS)
  for path in (*ROOT.glob("xe_retrieval/*.py"), *ROOT.glob("benchmarks/*.py")):
    known |= flags_of(f"{path.parent.name}.{path.stem}")
  known |= (
    flags_of("xe_retrieval.search")
    | flags_of("xe_retrieval.zero_shot")
    | flags_of("xe_retrieval.embed")
    | {"help"}
    | flags_of_beam()
  )
  given = set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", PAGES[page]))
  assert given <= known, f"{page}: {given - known}"


def test_config_fields(page):
  from configs import cc, flickr8k_rerank

  for field in re.findall(r"--config\.([\w.]+)=", PAGES[page]):
    reranks = field == "first_stage" or field.startswith("joint.")
    part = (flickr8k_rerank if reranks else cc).get_config()
    for name in field.split("."):
      assert name in part, f"{page}: config.{field}"
      part = part[name]


def test_figures_of_the_paper():
  text = PAGES[pathlib.Path("docs/results.md")].split("## Drawn scenes")[0].lower()
  for table in (paper._CONCEPTUAL_CAPTIONS, paper._FLICKR30K):
    for loss, values in table.items():
      row = " | ".join([paper.NAMES[loss].lower(), *(f"{v:.2f}" for v in values)])
      assert f"| {row} |" in text


def test_citation():
  cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
  setup = (ROOT / "setup.py").read_text()
  assert f'version="{cited["version"]}"' in setup and f'license="{cited["license"]}"' in setup
  assert f"## [{cited['version']}]" in (ROOT / "CHANGELOG.md").read_text()
  assert cited["preferred-citation"]["title"].endswith("With Cross-Example Softmax")


@pytest.mark.slow
def test_python_examples(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  result = doctest.testfile(str(ROOT / "docs" / "python.md"), module_relative=False)
  assert result.attempted > 40 and result.failed == 0


def test_worked_examples_are_short():
  titles = re.findall(r"^### (.*)", DEVELOPMENT, re.M)
  assert titles == ["A loss", "A tower", "A data set", "A vector store"]
  for _, block in BLOCKS:
    assert len(block.splitlines()) < 40, block[:80]


@pytest.mark.slow
def test_worked_examples(tmp_path):
  """Makes the changes of development.md to a copy of the package, and runs its checks."""
  for folder in ("xe_retrieval", "configs"):
    shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
  for name, block in EXAMPLES.items():
    (tmp_path / name).write_text(block)
  for diff in (block for language, block in BLOCKS if language == "diff"):
    subprocess.run(["git", "apply", "-C1"], input=diff, text=True, cwd=tmp_path, check=True)
  checks = [b for language, b in BLOCKS if language == "python" and b not in EXAMPLES.values()]
  assert len(checks) == 4
  (tmp_path / "checks.py").write_text("\n".join(checks))
  env = {"PYTHONPATH": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": str(CACHE / "jax")}
  command = [sys.executable, "checks.py"]
  out = subprocess.run(command, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True)
  assert out.returncode == 0, out.stderr
