"""The launch files: shell syntax, the JobSet's schema, flags and exit codes of their commands."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap
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
  """An environment with stand-ins for the programs that launch files call.

  A call that the program would not understand exits with 64. `python` records its arguments and
  exits with $CODE. A TPU host is a folder; what ssh started there dies with the connection, unless
  it has a session of its own.
  """
  programs = {
    "python": """
      printf "%s\\n" "$@" > "$STAGE/argv"; echo start >> "$STAGE/starts"
      while [ -n "${WAIT:-}" ] && [ ! -f "$STAGE/go" ]; do sleep 0.1; done
      touch "$STAGE/ended"; exit ${CODE:-0}""",
    "srun": """
      cores=--cpus-per-task=${SLURM_CPUS_PER_TASK:-1}
      [ "$1 $2 $3" = "--kill-on-bad-exit=1 $cores python" ] || exit 64
      shift 2; exec "$@" """,
    "scontrol": 'echo "$@" >> "$STAGE/asked"',
    "gcloud": """
      cd "$STAGE"; mkdir -p host; echo "$@" >> calls
      case "$*" in
        "storage rsync --recursive gs://my-bucket/xe_retrieval/datasets datasets") exit;;
        "compute tpus tpu-vm scp "*" xe-pod:xe_retrieval.tar.gz --zone=us-central2-b --worker=all")
          cp "$5" host/xe_retrieval.tar.gz; exit;;
        "compute tpus tpu-vm ssh xe-pod --zone=us-central2-b --worker="*" --command="*) ;;
        *) echo "gcloud $*" >&2; exit 64;;
      esac
      cd host
      setsid bash -c "${8#--command=}" & session=$!
      code=0; wait $session || code=$?
      sleep 2; pkill -KILL -s $session
      exit $code""",
    # Ubuntu 22.04's: 3.10, with pip.
    "python3": """
      case "$*" in
        "-m pip install --quiet --user uv") touch "$STAGE/uv";;
        "-m uv venv --python=3.11 --seed .venv") [ -f "$STAGE/uv" ] && mkdir -p .venv/bin &&
          cp "$STAGE/python" .venv/bin/python && cp "$STAGE/pip" .venv/bin/pip &&
          touch .venv/bin/activate;;
        *) exit 64;;
      esac""",
    "pip": """
      [ "$*" = "install --quiet -c constraints.txt -e .[tpu,gcs]" ] && [ -f constraints.txt ] &&
        [ -f setup.py ] && touch "$STAGE/installed" """,
  }
  for name, body in programs.items():
    (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{textwrap.dedent(body)}\n")
    (tmp_path / name).chmod(0o755)
  (tmp_path / "venv" / "bin").mkdir(parents=True)
  (tmp_path / "venv" / "bin" / "activate").write_text("")
  path = f"{tmp_path}:/usr/bin:/bin"
  return dict(os.environ, PATH=path, STAGE=str(tmp_path), VIRTUAL_ENV=str(tmp_path / "venv"))


def appears(path):
  """The path, once there is such a file: started programs go on in the background."""
  for _ in range(600):
    if path.exists():
      break
    time.sleep(0.1)
  return path


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
  argv = appears(pathlib.Path(stage["STAGE"]) / "argv").read_text().splitlines()
  config, distributed = parsed(argv, devices)
  assert distributed
  assert config.batch_size >= 4096 and config.data.dir.endswith("datasets")
  assert config.loss_implementation == "streaming" and config.dtype == "bfloat16"
  assert not config.data.dir.startswith("gs:")  # shards are read from a disk


def test_a_tpu_host_gets_python_3_11_and_one_job_that_outlives_the_connection(stage):
  here = pathlib.Path(stage["STAGE"])
  command = ["bash", ROOT / "launch" / "tpu_pod.sh"]
  for _ in range(2):  # the second start finds the first one running
    subprocess.run(command, check=True, env=stage | {"WAIT": "1"}, cwd=ROOT)
    assert (here / "installed").exists() and not (here / "ended").exists()
  (here / "go").touch()
  appears(here / "ended")
  assert (here / "starts").read_text() == "start\n"
  log = subprocess.run(command, env=stage | {"LOG": "1"}, cwd=ROOT)
  assert log.returncode == 0 and (here / "host" / "xe_retrieval" / "train.log").exists()
  assert (here / "host" / "xe_retrieval" / "configs" / "cc_large.py").exists()


@pytest.mark.parametrize("code", [0, 1, main.STOPPED])
def test_slurm_requeues_a_stopped_job_and_no_other(code, stage):
  stage |= {"CODE": str(code), "SLURM_JOB_ID": "17", "SLURM_CPUS_PER_TASK": "12"}
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


def embed_arguments(argv):
  """Parses a command line of embed as the program would."""
  assert argv[:2] == ["-m", "xe_retrieval.embed"]
  check = (
    "import json, sys; from absl import flags; from xe_retrieval import config; "
    "from xe_retrieval.embed import __main__ as m, directory; m._define_flags(); "
    "config.parse_flags(['embed', *sys.argv[1:]], remote=('out',)); m._check(flags.FLAGS, ()); "
    "print(json.dumps(directory.parse_part(flags.FLAGS.part)))"
  )
  command = [sys.executable, "-c", check, *argv[2:]]
  out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert out.returncode == 0, out.stderr
  return json.loads(out.stdout)


@pytest.mark.parametrize("code", [0, 1, 143])
def test_slurm_embeds_a_part_per_task(code, stage):
  here = pathlib.Path(stage["STAGE"])
  tasks = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "1"}
  tasks["SLURM_CPUS_PER_TASK"] = "12"
  script = ROOT / "launch" / "embed_slurm.sh"
  out = subprocess.run(["bash", script], env=stage | tasks | {"CODE": str(code)}, cwd=ROOT)
  assert out.returncode == code
  assert embed_arguments((here / "argv").read_text().splitlines()) == [[3], 64]
  assert "#SBATCH --array=1-64\n" in script.read_text() and "PARTS:-64" in script.read_text()
  asked = here / "asked"
  assert asked.exists() == (code == 143)
  assert code != 143 or asked.read_text() == "requeue 17_3\n"


def test_kubernetes_embeds_a_part_per_index(stage):
  job = yaml.safe_load((ROOT / "launch" / "embed_kubernetes.yaml").read_text())
  assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
  _check(job, {"apiVersion": str, "kind": str, "metadata": {"name": str}, "spec": JOB}, "Job")
  spec = job["spec"]
  (container,) = spec["template"]["spec"]["containers"]
  image = (ROOT / "Dockerfile").read_text()
  group = spec["template"]["spec"]["securityContext"]["fsGroup"]
  assert f"\nUSER {group}\nWORKDIR {container['workingDir']}\n" in image
  env = {e["name"]: e["value"] for e in container["env"]}
  assert spec["completionMode"] == "Indexed" and int(env["PARTS"]) == spec["completions"]
  assert "$(PARTS)" not in str(container["command"])  # Kubernetes would replace it before bash
  volumes = {v["name"] for v in spec["template"]["spec"]["volumes"]}
  assert {m["name"] for m in container["volumeMounts"]} == volumes
  stopped = [rule for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
  assert [r["onExitCodes"]["values"] for r in stopped] == [[143]]
  assert {r["action"] for r in spec["podFailurePolicy"]["rules"]} == {"Ignore"}
  assert stopped[0]["onExitCodes"]["containerName"] == container["name"]
  for index in (0, spec["completions"] - 1):
    given = stage | env | {"JOB_COMPLETION_INDEX": str(index)}
    subprocess.run(container["command"], env=given, cwd=ROOT, check=True)
    argv = (pathlib.Path(stage["STAGE"]) / "argv").read_text().splitlines()
    assert embed_arguments(argv) == [[index + 1], spec["completions"]]


LOCAL = """
part=${!#}; part=${part#--part=}; cores=$(taskset -cp $$ | sed "s/.*: //")
printf "%s %s\\n" "$part" "$cores" >> "$STAGE/parts"
trap "echo $part >> $STAGE/stopped; exit 143" TERM
[ "$part" != "${FAILS:-}" ] || exit 3
while [ -n "${WAIT:-}" ]; do sleep 0.1; done
"""


def test_embed_on_one_machine_divides_parts_and_cores(stage):
  here = pathlib.Path(stage["STAGE"])
  (here / "python").write_text(f"#!/usr/bin/env bash\n{LOCAL}")
  command = [
    "bash",
    ROOT / "launch" / "embed_local.sh",
    "2",
    "--workdir=w",
    "--images=i",
    "--out=o",
  ]
  subprocess.run(command, env=stage | {"PARTS": "5"}, cwd=ROOT, check=True)
  found = dict(line.split() for line in (here / "parts").read_text().splitlines())
  assert found.keys() == {f"{i}/5" for i in range(1, 6)}
  assert found["1/5"] == found["3/5"] == found["5/5"] and found["2/5"] == found["4/5"]
  assert found["1/5"] != found["2/5"] or len(os.sched_getaffinity(0)) == 1
  out = subprocess.run(command, env=stage | {"FAILS": "2/2"}, cwd=ROOT)
  assert out.returncode == 3
  assert subprocess.run(command[:2], cwd=ROOT, capture_output=True).returncode == 2


def test_embed_on_one_machine_passes_sigterm_on(stage):
  here = pathlib.Path(stage["STAGE"])
  (here / "python").write_text(f"#!/usr/bin/env bash\n{LOCAL}")
  command = [
    "bash",
    ROOT / "launch" / "embed_local.sh",
    "2",
    "--workdir=w",
    "--images=i",
    "--out=o",
  ]
  running = subprocess.Popen(command, env=stage | {"WAIT": "1", "PARTS": "6"}, cwd=ROOT)
  for _ in range(600):
    if (here / "parts").exists() and len((here / "parts").read_text().splitlines()) == 2:
      break
    time.sleep(0.1)
  time.sleep(0.5)
  running.terminate()
  assert running.wait(timeout=60) == 143
  assert sorted((here / "stopped").read_text().split()) == ["1/6", "2/6"]


# The fields of the JobSet and pod schemas that we use: any other is a misspelling.
CONTAINER = {
  "name": str, "image": str, "workingDir": str, "command": [str],
  "env": [{"name": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath": str}}}],
  "ports": [{"containerPort": int}],
  "resources": {
    "limits": {"google.com/tpu": int, "memory": str}, "requests": {"cpu": str, "memory": str},
  },
  "volumeMounts": [{"name": str, "mountPath": str}],
}  # fmt: skip
POD = {
  "restartPolicy": str, "terminationGracePeriodSeconds": int, "containers": [CONTAINER],
  "nodeSelector": dict, "securityContext": {"fsGroup": int},
  "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}}],
}  # fmt: skip
ON_CODES = {"containerName": str, "operator": str, "values": [int]}
ON_CONDITIONS = [{"type": str, "status": str}]
JOB = {
  "parallelism": int, "completions": int, "completionMode": str, "backoffLimit": int,
  "backoffLimitPerIndex": int, "maxFailedIndexes": int,
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
