"""The launch files: shell syntax, the JobSet's schema, flags and exit codes of their commands."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest
import yaml

from tests.conftest import ROOT
from xe_retrieval import config as config_lib
from xe_retrieval import main
from xe_retrieval.training import loop

SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: pathlib.Path(s).name)
def test_shell_syntax(script):
  subprocess.run(["bash", "-n", script], check=True)


@pytest.fixture
def stage(tmp_path):
  """An environment with fakes of the programs that launch files call.

  `python` records its arguments and exits with $CODE; `scontrol` records its own.
  """
  programs = {
    "python": 'printf "%s\\n" "$@" > "$STAGE/argv"; sleep ${WAIT:-0}; touch "$STAGE/ended"; '
    "exit ${CODE:-0}",
    "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
    "scontrol": 'echo "$@" >> "$STAGE/asked"',
    # A host: what ssh started dies with its session, unless it has one of its own.
    "gcloud": 'for a; do case $a in --command=*) ran=${a#--command=};; esac; done\n'
    'case ${ran:-} in *xe_retrieval.main*) cd "$STAGE" && setsid --wait bash -c "$ran"; sleep 1;; '
    '*uv*) echo "$ran" > "$STAGE/setup";; esac',
  }  # fmt: skip
  for name, body in programs.items():
    (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
    (tmp_path / name).chmod(0o755)
  for folder in ("venv/bin", "xe_retrieval/.venv/bin"):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "activate").write_text("")
  path = f"{tmp_path}:/usr/bin:/bin"
  return dict(os.environ, PATH=path, STAGE=str(tmp_path), VIRTUAL_ENV=str(tmp_path / "venv"))


_PARSE = """
import json, sys
from absl import flags
from xe_retrieval import config, main
main.define_flags()
config.parse_flags(sys.argv, remote=["workdir"])
f = flags.FLAGS
print(json.dumps([f.config.to_dict(), f.workdir, f.distributed]))
"""


def parsed(argv, devices):
  """Parses and validates a command line -> config, --distributed."""
  assert argv[:2] == ["-m", "xe_retrieval.main"]
  command = [sys.executable, "-c", _PARSE, *argv[2:]]  # flags can be defined only once per process
  out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert out.returncode == 0, out.stderr
  config, workdir, distributed = json.loads(out.stdout)
  assert workdir
  config = config_lib.from_json(json.dumps(config))
  loop.validate(config, devices)
  return config, distributed


@pytest.mark.parametrize(("script", "devices"), [("slurm.sh", 16), ("tpu_pod.sh", 16)])
def test_the_command_of_a_script_parses(script, devices, stage):
  subprocess.run(["bash", ROOT / "launch" / script], check=True, env=stage, cwd=ROOT)
  argv = (pathlib.Path(stage["STAGE"]) / "argv").read_text().splitlines()
  config, distributed = parsed(argv, devices)
  assert distributed
  assert config.batch_size >= 4096 and config.data.dir.endswith("datasets")
  assert config.loss_implementation == "streaming" and config.dtype == "bfloat16"
  assert not config.data.dir.startswith("gs:")  # shards are read from a disk


def test_a_tpu_host_gets_python_3_11_and_a_job_without_the_connection(stage):
  stage["WAIT"] = "2"  # it goes on after gcloud has returned
  subprocess.run(["bash", ROOT / "launch" / "tpu_pod.sh"], check=True, env=stage, cwd=ROOT)
  here = pathlib.Path(stage["STAGE"])
  assert "uv venv --python=3.11" in (here / "setup").read_text()
  time.sleep(3)
  assert (here / "ended").exists() and (here / "argv").exists()


@pytest.mark.parametrize("code", [0, 1, main.STOPPED])
def test_slurm_requeues_a_stopped_job_and_no_other(code, stage):
  stage |= {"CODE": str(code), "SLURM_JOB_ID": "17"}
  out = subprocess.run(["bash", ROOT / "launch" / "slurm.sh"], env=stage, cwd=ROOT)
  assert out.returncode == code
  asked = pathlib.Path(stage["STAGE"]) / "asked"
  assert asked.exists() == (code == main.STOPPED)
  assert code != main.STOPPED or asked.read_text() == "requeue 17\n"


def test_the_exit_code_of_a_stopped_run_is_in_the_help():
  command = [sys.executable, "-m", "xe_retrieval.main", "--help"]
  assert (
    "75 (EX_TEMPFAIL), stopped"
    in subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
  )


@pytest.mark.parametrize(
  ("code", "outcome"),
  [
    (0, "Complete"),
    (1, "RestartJobSet"),  # counts towards maxRestarts
    (main.STOPPED, "RestartJobSetAndIgnoreMaxRestarts"),
  ],
)
def test_kubernetes_restarts_a_stopped_job(code, outcome):
  job = yaml.safe_load((ROOT / "launch" / "kubernetes.yaml").read_text())["spec"]
  assert controller(job, code) == outcome
  assert job["failurePolicy"]["maxRestarts"] > 0


def controller(jobset, code):
  """What Kubernetes' Job and JobSet controllers do if the container exits with this code."""
  job = jobset["replicatedJobs"][0]["template"]["spec"]
  pod = job["template"]["spec"]
  if code == 0:
    return "Complete"
  assert pod["restartPolicy"] == "Never" and job["backoffLimit"] == 0  # the pod fails, and its job
  reason = "BackoffLimitExceeded"
  for rule in job["podFailurePolicy"]["rules"]:
    on = rule.get("onExitCodes")
    if on and on["containerName"] == pod["containers"][0]["name"] and code in on["values"]:
      assert (rule["action"], on["operator"]) == ("FailJob", "In")
      reason = "PodFailurePolicy"
      break
  for rule in jobset["failurePolicy"]["rules"]:  # the first that matches
    if reason in rule["onJobFailureReasons"]:
      return rule["action"]
  return "RestartJobSet"


def test_the_job_set():
  job = yaml.safe_load((ROOT / "launch" / "kubernetes.yaml").read_text())
  assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
  _check(job, JOBSET, "JobSet")
  (workers,) = job["spec"]["replicatedJobs"]
  spec = workers["template"]["spec"]
  pod = spec["template"]["spec"]
  (container,) = pod["containers"]
  env = {e["name"]: e for e in container["env"]}
  hosts = spec["parallelism"]
  assert spec["completions"] == hosts == int(env["JAX_NUM_PROCESSES"]["value"])
  name = job["metadata"]["name"]
  host, port = env["JAX_COORDINATOR_ADDRESS"]["value"].split(":")
  assert host == f"{name}-{workers['name']}-0-0.{name}"
  assert container["ports"][0]["containerPort"] == int(port)
  assert "completion-index" in env["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
  assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
  assert container["command"][0] == "python"
  devices = hosts * container["resources"]["limits"]["google.com/tpu"]
  parsed(container["command"][1:], devices)


# The fields of the JobSet and pod schemas that we use: any other is a misspelling.
CONTAINER = {
  "name": str, "image": str, "workingDir": str, "command": [str],
  "env": [{"name": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath": str}}}],
  "ports": [{"containerPort": int}],
  "resources": {"limits": {"google.com/tpu": int}},
  "volumeMounts": [{"name": str, "mountPath": str}],
}  # fmt: skip
POD = {
  "restartPolicy": str, "terminationGracePeriodSeconds": int, "containers": [CONTAINER],
  "nodeSelector": dict,
  "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}}],
}  # fmt: skip
ON_CODES = {"containerName": str, "operator": str, "values": [int]}
ON_CONDITIONS = [{"type": str, "status": str}]
JOB = {
  "parallelism": int, "completions": int, "completionMode": str, "backoffLimit": int,
  "podFailurePolicy": {
    "rules": [{"action": str, "onExitCodes": ON_CODES, "onPodConditions": ON_CONDITIONS}]
  },
  "template": {"spec": POD},
}  # fmt: skip
JOBSET = {
  "apiVersion": str, "kind": str, "metadata": {"name": str},
  "spec": {
    "network": {"enableDNSHostnames": bool},
    "failurePolicy": {
      "maxRestarts": int,
      "rules": [{"name": str, "action": str, "onJobFailureReasons": [str]}],
    },
    "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
  },
}  # fmt: skip


def _check(value, schema, where):
  if isinstance(schema, dict):
    assert isinstance(value, dict), where
    for key, part in value.items():
      assert key in schema, f"{where}.{key} is not a field"
      _check(part, schema[key], f"{where}.{key}")
  elif isinstance(schema, list):
    assert isinstance(value, list) and value, where
    for i, part in enumerate(value):
      _check(part, schema[0], f"{where}[{i}]")
  else:
    assert isinstance(value, schema), where


def test_local_processes_sets_process_ids_and_returns_the_first_failure():
  script = ROOT / "launch" / "local_processes.sh"
  # One write each, because the three share a pipe.
  show = (
    "import os; os.write(1, os.path.expandvars('$JAX_PROCESS_ID of $JAX_NUM_PROCESSES|').encode())"
  )
  out = subprocess.run(
    [script, "3", "--", sys.executable, "-c", show], check=True, capture_output=True, text=True
  )
  assert sorted(out.stdout.split("|")) == ["", "0 of 3", "1 of 3", "2 of 3"]
  fail = "import os, sys, time; os.environ['JAX_PROCESS_ID'] == '1' and sys.exit(3); time.sleep(60)"
  failed = subprocess.run(
    [script, "2", "--", sys.executable, "-c", fail], env=dict(os.environ, GRACE="0"), timeout=30
  )
  assert failed.returncode == 3
  assert subprocess.run([script, "2"], capture_output=True).returncode == 2


def test_local_processes_does_not_kill_those_that_are_still_saving(tmp_path):
  script = ROOT / "launch" / "local_processes.sh"
  stop = "if [ $JAX_PROCESS_ID = 1 ]; then sleep 2; touch saved; fi; exit 75"
  out = subprocess.run(
    [script, "2", "--", "bash", "-c", stop], env=dict(os.environ, GRACE="0"), cwd=tmp_path
  )
  assert out.returncode == main.STOPPED and (tmp_path / "saved").exists()
