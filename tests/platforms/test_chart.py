"""The Helm chart: linted, rendered, and checked strictly against Kubernetes' and KEDA's schemas."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.common.broker.acl import ROLES, user_name
from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.config.redis_url import parse_url
from penstock.common.errors import FLEET_NEVER_RESTARTED
from penstock.common.wire.ids import TicketId
from tests.common.builders import V0, Run
from tests.helpers import AclUsers, free_port, wait_until
from tests.platforms.checks import BIN, DEPLOY, planted, run
from tests.platforms.test_containers import connect, queue_server

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
keda = pytest.importorskip(
    "cloudcoil.models.keda.v1alpha1", reason="cloudcoil.models.keda is not installed"
)

CHART = DEPLOY / "helm" / "penstock"
OLDEST, NEWEST = "1.31", "1.37"
"""Of the versions of Kubernetes against which the objects are checked; Chart.yaml names the oldest."""

RUN = {"name": "first", "env": {"LEARNER_MODEL": "org/model", "LEARNER_DATASET": "org/questions"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "a node of eight": {"learner": {"gpus": 6}, "actors": {"gpus": 2}},
    "no GPU": {"image": "penstock:cpu", "learner": {"gpus": 0}, "actors": {"gpus": 0}},
    "no KEDA": {"keda": False, "existingSecret": "mine"},
    "places": {
        "actors": {
            "cacheLimit": "90Gi",
            "nodeSelector": {"spot": "yes"},
            "tolerations": [{"key": "spot"}],
        }
    },
}


def render(values: dict[str, Any], chart: Path = CHART) -> list[dict[str, Any]]:
    """The objects that `helm install first` would send, for values beside those of the chart."""
    with helm.Chart.load(str(chart)) as loaded:
        texts = loaded.render({"run": RUN, **values}, name="first", namespace="ml")
    return [one for text in texts.values() for one in yaml.safe_load_all(text) if one]


def check(one: dict[str, Any], *versions: str) -> None:
    """Raise an error for an object with a field that its kind does not have, or of a wrong type.

    `versions` are those of Kubernetes.
    """
    if one["apiVersion"].startswith("keda.sh/"):
        found = getattr(keda, one["kind"]).model_validate(one)
        known = found.model_dump(mode="json", by_alias=True, exclude_unset=True)
        assert known == one, f"KEDA knows no such field in {one['kind']}"
        return
    for version in versions:
        kubernetes.validate(one, version, strict=True)


def check_all(chart: Path) -> None:
    """Raise an error if a chart cannot be rendered, or as `check` for one of its objects."""
    for one in render({}, chart):
        check(one, OLDEST)


def variables(kind: str, name: str, **values: Any) -> dict[str, str]:
    """The variables that the first container of a pod has beside those of ConfigMap and Secrets."""
    (container,) = find(kind, name, **values)["spec"]["template"]["spec"]["containers"]
    return {one["name"]: one["value"] for one in container["env"]}


def find(kind: str, name: str, **values: Any) -> dict[str, Any]:
    (found,) = [
        one
        for one in render(values)
        if one["kind"] == kind and one["metadata"]["name"] == f"first-{name}"
    ]
    return found


def test_helm_finds_nothing_in_the_chart():
    found = helm.lint(str(CHART))
    assert found["errors"] == []
    assert {one["error"] for one in found["messages"]} <= {"icon is recommended"}


def test_helm_finds_a_planted_error(tmp_path):
    shutil.copytree(CHART, tmp_path / "penstock")
    planted(CHART / "Chart.yaml", tmp_path / "penstock", "\nversion:", "\nversoin:")
    assert "version is required" in str(helm.lint(str(tmp_path / "penstock"))["errors"])


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_every_object_has_the_form_that_kubernetes_and_keda_ask_for(values):
    objects = render(values)
    for one in objects:
        check(one, NEWEST, *([] if values else [OLDEST]))
    kinds = {one["kind"] for one in objects}
    assert {"StatefulSet", "Job", "Deployment", "PodDisruptionBudget"} <= kinds
    assert ("ScaledObject" in kinds) == values.get("keda", True)
    assert ("Secret" in kinds) == ("existingSecret" not in values)


@pytest.mark.parametrize(
    ("file", "old", "new", "text"),
    [
        ("learner.yaml", "backoffLimit:", "backofLimit:", "backofLimit"),
        ("learner.yaml", ', status: "True"', "", "status"),
        ("queue.yaml", "replicas: 1", "replicas: one", "one"),
        ("workers.yaml", "terminationGracePeriodSeconds", "gracePeriodSeconds", "gracePeriodSeconds"),
        ("disruption.yaml", "minAvailable: 1", "minimum: 1", "minimum"),
        ("scaling.yaml", "maxReplicaCount", "maxReplicas", "KEDA knows no such field"),
        ("scaling.yaml", "target: {{", "target: 3 # {{", "target"),
        ("settings.yaml", "{{- end }}", "", "unexpected EOF"),
    ],
)
def test_a_planted_error_is_caught(tmp_path, file, old, new, text):
    shutil.copytree(CHART, tmp_path / "penstock")
    planted(CHART / "templates" / file, tmp_path / "penstock" / "templates", old, new)
    with pytest.raises(Exception, match=text):  # of Helm, of a schema, or of the comparison above
        check_all(tmp_path / "penstock")


@pytest.mark.parametrize(
    "values", [{"actors": {"maximum": 3}}, {"learner": {"gpus": "two"}}, {"run": {"name": "a b"}}]
)
def test_misspelt_values_are_refused(values):
    with pytest.raises(helm.HelmValuesError), helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)


def test_the_job_is_not_repeated_after_the_exit_codes_that_say_so():
    rules = find("Job", "learner")["spec"]["podFailurePolicy"]["rules"]
    (codes,) = [rule["onExitCodes"]["values"] for rule in rules if rule["action"] == "FailJob"]
    assert set(codes) == FLEET_NEVER_RESTARTED
    assert codes == sorted(codes), "Kubernetes wants them in order"


def test_each_pod_sees_its_own_users_url_and_only_the_rewarder_is_root():
    secret = find("Secret", "queue")["stringData"]
    for role in ROLES:
        assert parse_url(secret[f"{role}.url"]).username == user_name("first", role)
    pods = {
        "operator": find("StatefulSet", "queue"),
        "learner": find("Job", "learner"),
        "actor": find("Deployment", "actor"),
        "rewarder": find("Deployment", "rewarder"),
    }
    for role, one in pods.items():
        pod = one["spec"]["template"]["spec"]
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "url"]
        assert volume["secret"]["items"] == [{"key": f"{role}.url", "path": "url"}]
        user = pod["securityContext"]["runAsUser"]
        assert (user, pod["securityContext"].get("runAsNonRoot")) == (
            (0, None) if role == "rewarder" else (10001, True)
        )
        for container in pod["containers"]:
            assert "privileged" not in container["securityContext"]
            assert "add" not in container["securityContext"].get("capabilities", {})


def test_the_learners_first_container_gives_the_users_the_passwords_of_the_secret(tmp_path):
    place = f"127.0.0.1:{free_port()}"
    (tmp_path / "operator").mkdir(mode=0o700)
    (tmp_path / "users").mkdir()
    for key, value in find("Secret", "queue")["stringData"].items():
        file = tmp_path / "operator" / key
        file.write_text(value.replace("first-queue:6379", place))
        file.chmod(0o440)
    (first,) = find("Job", "learner")["spec"]["template"]["spec"]["initContainers"]
    words = [
        word.replace("/operator/", f"{tmp_path}/operator/").replace("/users", f"{tmp_path}/users")
        for word in (*first["command"], *first["args"])
    ]
    url_file = tmp_path / "operator" / "operator.url"
    with queue_server(tmp_path, url_file):
        connect(url_file.read_text())
        variables = {
            "REDIS_URL_FILE": str(url_file),
            "RUN_NAME": "first",
            "PATH": f"{BIN}:/usr/bin:/bin",
        }
        done = run(*words, **variables)
        assert done.returncode == 0, done.stderr
        for role in ROLES:
            connect((tmp_path / "operator" / f"{role}.url").read_text()).execute("PING")


@pytest.mark.parametrize(
    ("learner", "told", "code"),
    [
        ("trap 'exit 0' TERM", True, 143),
        ("trap 'exit 1' TERM", True, 1),
        ("exit 0", False, 0),
        ("exit 78", False, 78),
    ],
)
def test_a_learner_that_is_told_to_stop_does_not_complete_its_job(tmp_path, learner, told, code):
    (tmp_path / "learner").write_text(f"#!/bin/sh\n{learner}\ntouch up\nwhile :; do sleep 0.05; done\n")
    (tmp_path / "learner").chmod(0o700)
    (container,) = find("Job", "learner")["spec"]["template"]["spec"]["containers"]
    assert container["args"][-1] == "learner"
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    job = subprocess.Popen(container["args"], cwd=tmp_path, env=path)  # tini of the image runs them
    if told:
        wait_until((tmp_path / "up").exists, "the learner")
        job.send_signal(signal.SIGTERM)
    assert job.wait(30) == code


def test_several_gpus_are_for_torchrun_which_waits_as_long_as_the_pod():
    job = find("Job", "learner", learner={"gpus": 6, "graceS": 300})
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = "python -m penstock.learner.torchrun --standalone --nproc-per-node 6"
    assert container["args"][-6:] == words.split()
    assert {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "290"} in container["env"]


def test_a_new_pod_of_the_learner_finds_what_the_last_one_got_from_the_hub():
    assert variables("Job", "learner")["HF_HOME"] == "/runs/huggingface"
    mine = {**RUN, "env": {**RUN["env"], "HF_HOME": "/models"}}
    assert "HF_HOME" not in variables("Job", "learner", run=mine)
    assert "HF_HOME" not in variables("Deployment", "actor"), "which has no such volume"


def test_an_actor_that_starts_again_in_its_pod_finds_the_weights_that_it_fetched():
    pod = find("Deployment", "actor")["spec"]["template"]["spec"]
    assert variables("Deployment", "actor")["RUN_CACHE_DIR"] == "/cache"
    assert {"name": "cache", "mountPath": "/cache"} in pod["containers"][0]["volumeMounts"]
    assert {"name": "cache", "emptyDir": {}} in pod["volumes"]
    pod = find("Deployment", "actor", actors={"cacheLimit": "90Gi"})["spec"]["template"]["spec"]
    assert {"name": "cache", "emptyDir": {"sizeLimit": "90Gi"}} in pod["volumes"]
    mine = {**RUN, "env": {"RUN_CACHE_DIR": "/mine"}}
    assert "RUN_CACHE_DIR" not in variables("Deployment", "actor", run=mine)


def test_the_settings_arrive_as_they_were_written():
    env = {"A": 1000000, "B": 12345678901, "C": 0.5, "D": True, "E": "1e+06", "F": 7}
    found = find("ConfigMap", "run", run={"name": "first", "env": env})["data"]
    wanted = {"A": "1000000", "B": "12345678901", "C": "0.5", "D": "true", "E": "1e+06", "F": "7"}
    assert {name: found[name] for name in env} == wanted


def test_new_settings_are_new_pods_of_actors_and_rewarders():
    for role in ("actor", "rewarder"):
        old, new = (
            find("Deployment", role, run={"name": "first", "env": {"A": value}})["spec"]["template"]
            for value in (1, 2)
        )
        assert old["metadata"]["annotations"] != new["metadata"]["annotations"]
        assert old["spec"] == new["spec"]


def test_learner_and_rewarders_have_secrets_of_their_own():
    values = {
        "run": {**RUN, "envFromSecrets": ["hub-token"]},
        "rewarders": {"envFromSecrets": ["judge", "search"]},
    }
    own = {"learner": ["hub-token"], "actor": [], "rewarder": ["judge", "search"]}
    for role, names in own.items():
        one = find("Job" if role == "learner" else "Deployment", role, **values)
        (container,) = one["spec"]["template"]["spec"]["containers"]
        check(one, OLDEST)
        given = [source["secretRef"]["name"] for source in container["envFrom"] if "secretRef" in source]
        assert given == names


def triggers(role: str, run: str) -> dict[str, dict[str, str]]:
    """By name, the metadata of the triggers by which KEDA scales a role of a run."""
    scaled = find("ScaledObject", role, run={**RUN, "name": run})["spec"]
    found = {one["name"]: one["metadata"] for one in scaled["triggers"]}
    assert scaled["advanced"]["scalingModifiers"]["formula"] == " + ".join(found)
    return found


def work(reader: Connection, role: str, run: str) -> int:
    """What KEDA reads for a role by its redis-streams scaler, as a user with a reader's rights.

    With streamLength and without consumerGroup that is XLEN.
    """
    asked = triggers(role, run).values()
    assert all("streamLength" in one and "consumerGroup" not in one for one in asked)
    return sum(reader.execute("XLEN", one["stream"]) for one in asked)


def test_keda_reads_the_open_work_of_each_stage_also_where_the_server_knows_no_lag(
    acl_users: AclUsers, keys: Keys, run_name: str
) -> None:
    assert work(acl_users.reader, "actor", run_name) == 0, "also before there is a stream"
    own = Run(acl_users.operator, keys)
    own.issue(1, 2, 3, 4, 5)
    assert work(acl_users.reader, "actor", run_name) == 5
    actor = own.actor()
    held = actor.take(2)
    assert work(acl_users.reader, "actor", run_name) == 5, "a ticket that an actor holds is work"
    own.issue(4, payload=b"of another contract")  # deletes an entry that nobody has read
    (group,) = acl_users.reader.execute("XINFO", "GROUPS", keys.tickets)
    assert group[b"lag"] is None
    assert work(acl_users.reader, "actor", run_name) == 5
    held += actor.take(10)
    for entry in held:
        assert actor.handoff(entry, keys.rollouts, b"group")
    assert work(acl_users.reader, "actor", run_name) == 0
    assert work(acl_users.reader, "rewarder", run_name) == 5
    own.learner.issue("eval", [(TicketId.evaluation(V0, 0), V0, b"ask")])
    assert work(acl_users.reader, "actor", run_name) == 1, "an evaluation needs actors too"


def test_the_triggers_name_the_keys_of_the_run() -> None:
    keys = Keys("a.b")
    for role, streams in (("actor", [keys.tickets, keys.eval_tickets]), ("rewarder", [keys.rollouts])):
        found = triggers(role, "a.b").values()
        assert [one["stream"] for one in found] == streams
        assert {one["address"] for one in found} == {"first-queue.ml.svc:6379"}
