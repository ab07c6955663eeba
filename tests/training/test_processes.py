"""Several processes stop together, fail together, and lose nothing when killed."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import chex
import jax
import pytest

from tests.conftest import ROOT
from xe_retrieval import config as config_lib
from xe_retrieval import main

SCRIPT = ROOT / "launch" / "local_processes.sh"


def launch(*arguments, code=0, timeout=300):
  """Runs 2 processes × 2 CPU devices, as a user starts them -> what they print."""
  env = dict(os.environ, JAX_NUM_CPU_DEVICES="2", PYTHON=sys.executable, PYTHONPATH=str(ROOT))
  env["GRACE"] = "1"
  out = subprocess.run(
    [SCRIPT, "2", "--", sys.executable, *arguments],
    env=env, cwd=ROOT, text=True, timeout=timeout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
  )  # fmt: skip
  assert out.returncode == code, out.stdout[-3000:]
  return out.stdout


def command(config, workdir):
  """The arguments of Python that train this config."""
  file = workdir.with_suffix(".py")
  workdir.with_suffix(".json").write_text(config_lib.to_json(config))
  file.write_text(
    "import pathlib\nfrom xe_retrieval import config\ndef get_config():\n"
    "  return config.from_json(pathlib.Path(__file__).with_suffix('.json').read_text())\n"
  )
  return "-m", "xe_retrieval.main", f"--config={file}", f"--workdir={workdir}"


def losses(workdir):
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
  return [line["loss"] for line in lines if "loss" in line]


SIGNALLED = """
import os, signal, sys
from xe_retrieval.data import mesh
from xe_retrieval.training import processes
import jax

with processes.together():
  for number in (signal.SIGTERM, signal.SIGINT):
    with processes.Interruption(mesh.make()) as interrupted:
      for n in range(1, 100):
        if n == 3 and jax.process_index() == 1:
          os.kill(os.getpid(), number)
        if interrupted():
          break
    os.write(1, f"{number.name} stopped at {n}|".encode())
  sys.exit(75)
"""


def test_a_signal_to_one_process_stops_both_one_step_later():
  printed = launch("-c", SIGNALLED, code=main.STOPPED)
  assert printed.count("SIGTERM stopped at 4|") == printed.count("SIGINT stopped at 4|") == 2


FAILING = """
import os, sys
from xe_retrieval.training import processes
import jax

with processes.together():
  try:
    with processes.primary_first("data"):
      if jax.process_index() == 0:
        raise OSError("the disk is full")
  except (OSError, ValueError) as error:
    os.write(1, f"{type(error).__name__} {error}|".encode())
  said = processes.exchange("health", "ill" if jax.process_index() else "")
  os.write(1, f"{said}|".encode())
  with processes.primary_first("data"):  # the same name again
    os.write(1, b"went on|")
  if jax.process_index() == FAILS:
    sys.exit("error: failed alone")
  processes.exchange("health", "waits for the other")
"""


@pytest.mark.parametrize("alone", [0, 1])
def test_a_failure_of_one_process_releases_the_others(alone):
  """Of process 0 where others wait for it; and of one alone, anywhere, which ends them all."""
  began = time.time()
  printed = launch("-c", FAILING.replace("FAILS", str(alone)), code=1)
  assert "OSError the disk is full|" in printed
  assert "ValueError process 0 failed: the disk is full|" in printed
  assert printed.count("['', 'ill']|") == 2 and printed.count("went on|") == 2
  assert printed.count("error: failed alone") == 1
  assert time.time() - began < 200  # JAX would wait for the other, for 300 s


ONE_CANNOT_READ = """
import os, sys
import jax
from xe_retrieval.training import checkpoints, processes

processes.join()
checkpoints.TrainState = dict
for text in ("stale file handle", "DATA_LOSS: checksum"):
  def read(self, step, like):
    if step == 4 and jax.process_index() == 1:
      raise OSError(text)
    return {"model": {}, "training": {}, "run": {"checksums": {}}}
  checkpoints.Checkpoints._read = read
  found = checkpoints.Checkpoints(sys.argv[1])
  try:
    found.resume(None)
    os.write(1, b"resumed|")
  except OSError as error:
    kept = os.path.exists(sys.argv[1] + "/checkpoints/4")
    os.write(1, f"{error}, {kept=}|".encode())
"""


def test_all_processes_decide_together_whether_a_checkpoint_is_damaged(workdir):
  printed = launch("-c", ONE_CANNOT_READ, str(workdir))
  assert len(re.findall(r"checkpoint 4 of \S+ cannot be read \(stale .*?kept=True\|", printed)) == 2
  assert printed.count("resumed|") == 2
  assert not (workdir / "checkpoints" / "4").exists() and (workdir / "damaged" / "4").exists()


FETCHING = """
import os, pathlib, sys, time
import jax
from configs import quickstart
from xe_retrieval.data import mesh
from xe_retrieval.towers import pretrained
from xe_retrieval.training import loop, processes

def fetch(config):
  weights = pathlib.Path(sys.argv[1])
  if jax.process_index() == 0:
    time.sleep(2)
    weights.touch()
  os.write(1, f"{weights.exists()=}|".encode())
  return config

with processes.together():
  pretrained.configure, loop.validate = fetch, lambda *_: sys.exit(0)
  loop.prepare(quickstart.get_config(), mesh.make())
"""


def test_one_process_fetches_the_towers_while_the_other_waits(tmp_path):
  printed = launch("-c", FETCHING, str(tmp_path / "weights"))
  assert printed.count("weights.exists()=True|") == 2


@pytest.mark.slow
def test_a_slurm_job_that_gets_sigterm_is_requeued_and_goes_on(config, finished, tmp_path):
  """launch/slurm.sh itself; `srun` starts two processes here, and one of them gets the signal."""
  bin_, shared = tmp_path / "bin", tmp_path / "shared"
  bin_.mkdir()
  (bin_ / "activate").write_text("")
  programs = {
    "srun": f'while [[ $1 == -* ]]; do shift; done; exec {SCRIPT} 2 -- "$@"',
    "scontrol": f'echo "$@" >> {tmp_path}/asked',
    "python": f'exec {sys.executable} "$@"',
  }
  for name, body in programs.items():
    (bin_ / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
    (bin_ / name).chmod(0o755)
  config.steps, config.log_every, config.data.dir = 400, 1, ""
  config.eval_every = config.checkpoint_every = 400
  train = " ".join(command(config, tmp_path / "job")[2:3])
  env = dict(os.environ, PATH=f"{bin_}:{os.environ['PATH']}", VIRTUAL_ENV=str(tmp_path))
  env |= dict(SHARED=str(shared), TRAIN=train, SLURM_JOB_ID="17", PYTHONPATH=str(ROOT))
  job = subprocess.Popen(["bash", ROOT / "launch" / "slurm.sh"], env=env, cwd=ROOT)
  workdir = shared / "runs" / "cc"
  while not (workdir / "metrics.jsonl").exists() or len(losses(workdir)) < 3:
    assert job.poll() is None, "it ended before the signal"
    time.sleep(0.05)
  one = subprocess.check_output(["pgrep", "-f", f"main .*{workdir}"], text=True).split()
  for pid in one:
    if b"JAX_PROCESS_ID=1" in pathlib.Path(f"/proc/{pid}/environ").read_bytes():
      os.kill(int(pid), signal.SIGTERM)
  assert job.wait(120) == main.STOPPED
  assert (tmp_path / "asked").read_text() == "requeue 17\n"
  (step,) = (p.name for p in (workdir / "checkpoints").iterdir() if p.name.isdecimal())
  assert 3 <= int(step) < 400 and len(losses(workdir)) == int(step)


def test_killed_in_a_save_nothing_is_lost(config, finished, tmp_path, capsys):
  """benchmarks/faults.py kills 200 times, also at other moments."""
  config.checkpoint_every, workdir = 1, tmp_path / "run"
  child = subprocess.Popen([sys.executable, *command(config, workdir)], cwd=ROOT)
  while not saving(workdir / "checkpoints"):
    assert child.poll() is None, "it ended before it was killed"
    time.sleep(0.002)
  child.kill()
  child.wait()
  state = jax.device_get(main.train(config, workdir, jax.devices()[:1]))
  printed = capsys.readouterr().out
  assert "resuming after step" in printed and "damaged" not in printed
  chex.assert_trees_all_equal(state, finished[1])


@pytest.mark.slow
def test_of_two_processes_one_or_both_are_killed_in_a_save_and_nothing_is_lost():
  """benchmarks/faults.py --processes=2 kills a hundred times; here once in each of three ways."""
  arguments = ["--processes=2", "--kills=3", "--at_once=1", "--steps=6"]
  command = [sys.executable, "-m", "benchmarks.faults", *arguments]
  out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
  assert out.returncode == 0, out.stdout + out.stderr
  for kind in ("SIGKILL of one", "SIGKILL of all", "SIGTERM of one"):
    assert f"1 {kind} in a save" in out.stdout
  for wrong in ("unusable", "partial checkpoints", "intact checkpoints", "final states"):
    assert f"\n0 {wrong}" in out.stdout


def saving(checkpoints):
  """Whether a checkpoint is being written after another one was finished."""
  names = os.listdir(checkpoints) if checkpoints.exists() else []
  return any(n.isdecimal() for n in names) and any("tmp" in n for n in names)
