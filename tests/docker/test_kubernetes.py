"""What the pods in docker/kubernetes promise, read without a cluster: order, rights, sizes, and settings that exist."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry import settings
from kvferry.supervise.memory import MARGIN, table_bytes
from tests.docker.pod import FOLDER, Pod

ROOT = Path(__file__).parents[2]
PODS = sorted(path.name for path in FOLDER.glob("*.yaml"))
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
DOCS = (ROOT / "docs/deployment.md").read_text()
IN_COMPOSE = {"pod.yaml": ("kvferry", "vllm-cpu"), "pod-gpu.yaml": ("kvferry-gpu", "vllm-gpu")}


@pytest.fixture(params=PODS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pod(name: str) -> Pod:
    return Pod(name)


def quantity(text: str) -> int:
    """Bytes of a Kubernetes quantity of memory."""
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", text).groups()  # type: ignore[union-attr]
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


def test_both_pods_are_there_and_in_the_docs() -> None:
    assert set(PODS) == set(IN_COMPOSE)
    for one in PODS:
        assert f"docker/kubernetes/{one}" in DOCS


def test_whatever_reads_yaml_can_read_it(name: str) -> None:
    """Anchors and merges are not understood by all that users put such a file through."""
    text = (FOLDER / name).read_text()
    tokens = {type(token).__name__ for token in yaml.scan(text)}
    assert not tokens & {"AnchorToken", "AliasToken", "TagToken"}


def test_kvferry_is_a_sidecar_that_serves_before_the_engine_starts(pod: Pod) -> None:
    assert pod.sidecar["restartPolicy"] == "Always", "without it a pod waits for its end"
    assert pod.sidecar["startupProbe"]["exec"]["command"] == ["kvferry", "status"]
    startup = pod.sidecar["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 15 * 60, "compose's start_period"
    assert "readinessProbe" not in pod.sidecar, "an engine without a cache serves all the same"
    grace = sum(int(COMPOSE["services"][one]["stop_grace_period"].removesuffix("s")) for one in ("kvferry", "vllm-cpu"))
    assert pod.spec["terminationGracePeriodSeconds"] >= grace, "one ends after the other"


def test_liveness_is_that_the_daemon_answers_and_no_more(pod: Pod) -> None:
    """Case 53: the same question as in compose: a rank's trouble takes the cache from nobody else."""
    health = COMPOSE["services"]["kvferry"]["healthcheck"]["test"]
    assert ["CMD", *pod.sidecar["livenessProbe"]["exec"]["command"]] == health


def test_settings_are_known_and_valid_and_both_meet_at_one_place(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in pod.env(pod.sidecar).items():
        assert variable.removeprefix(settings.ENV_PREFIX).lower() in settings.Settings.model_fields, variable
        monkeypatch.setenv(variable, value)
    loaded = settings.load({})
    run = Path(pod.env(pod.engine)["KVFERRY_RUN_DIR"])
    assert loaded.run_dir == run
    for container in (pod.sidecar, pod.engine):
        assert pod.at(container, str(run.parent)) == "run", "the folder itself is made by kvferry, closed to others"
    assert [one for one in pod.env(pod.engine) if one.startswith("KVFERRY_")] == ["KVFERRY_RUN_DIR"]
    size = f"--tensor-parallel-size={loaded.tp_size}"
    assert size in pod.engine["args"]


def test_images_device_and_connector_are_those_of_compose(name: str, pod: Pod) -> None:
    for container, service in zip((pod.sidecar, pod.engine), IN_COMPOSE[name], strict=True):
        assert container["image"] == COMPOSE["services"][service]["image"]
    assert (
        pod.env(pod.sidecar)["KVFERRY_DEVICE"]
        == COMPOSE["services"][IN_COMPOSE[name][0]]["environment"]["KVFERRY_DEVICE"]
    )
    words = shlex.split(COMPOSE["services"]["vllm-cpu"]["command"])
    config = words[words.index("--kv-transfer-config") + 1]
    assert f"--kv-transfer-config={config}" in pod.engine["args"]
    assert "--enable-prompt-tokens-details" in pod.engine["args"]


def test_no_container_has_a_right_that_it_does_not_need(pod: Pod) -> None:
    """Case 99: no namespace of the host, no root, no capability, no port but the engine's."""
    assert not set(pod.spec) & {"hostNetwork", "hostIPC", "hostPID", "hostUsers"}
    assert pod.spec["securityContext"]["runAsNonRoot"] is True
    assert pod.spec["automountServiceAccountToken"] is False
    (uid,) = set(re.findall(r"^ARG KVFERRY_UID=(\d+)$", DOCKERFILE, re.M))
    assert pod.spec["securityContext"]["runAsUser"] == pod.spec["securityContext"]["runAsGroup"] == int(uid)
    for container in (pod.sidecar, pod.engine):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    assert "ports" not in pod.sidecar
    assert all("emptyDir" in one for one in pod.spec["volumes"]), "no place of the node"


def test_all_that_is_written_lies_on_a_volume(pod: Pod) -> None:
    """With a read-only root: what the image's environment names, and /tmp."""
    assert {one["mountPath"] for one in pod.sidecar["volumeMounts"]} == {"/run/kvferry", "/dev/shm", "/tmp"}
    assert {one["mountPath"] for one in pod.engine["volumeMounts"]} == {"/run/kvferry", "/dev/shm", "/tmp", "/cache"}
    mounted = {one["name"] for container in (pod.sidecar, pod.engine) for one in container["volumeMounts"]}
    assert mounted == set(pod.volumes)
    assert pod.at(pod.sidecar, "/dev/shm") != pod.at(pod.engine, "/dev/shm"), "each has its own"


def test_the_pool_fits_its_volume_and_the_sidecars_limit(pod: Pod) -> None:
    """Case 104: no eviction for memory: a volume in memory is charged to whoever wrote it first."""
    pool = settings.parse_bytes(pod.env(pod.sidecar)["KVFERRY_HOST_MEMORY"])
    shm = pod.volumes[pod.at(pod.sidecar, "/dev/shm")]
    assert shm["medium"] == pod.volumes["run"]["medium"] == "Memory"
    assert quantity(shm["sizeLimit"]) >= pool + table_bytes(pool)
    limit = quantity(pod.sidecar["resources"]["limits"]["memory"])
    assert limit >= pool * (1 + MARGIN) + table_bytes(pool) + (1 << 30), "some 100 MiB for each of its processes"
    for container in (pod.sidecar, pod.engine):
        memory = container["resources"]
        assert memory["limits"]["memory"] == memory["requests"]["memory"], "what is reserved must be there"


def test_an_engine_on_cpu_has_room_to_lend_its_kv() -> None:
    """Case 101: KV in CPU memory moves into the engine's own /dev/shm when it is lent, and is there twice meanwhile."""
    pod = Pod("pod.yaml")
    kv = int(pod.env(pod.engine)["VLLM_CPU_KVCACHE_SPACE"]) << 30
    shm = pod.volumes[pod.at(pod.engine, "/dev/shm")]
    assert quantity(shm["sizeLimit"]) >= kv + (1 << 29)
    assert quantity(pod.engine["resources"]["limits"]["memory"]) >= 2 * kv + (4 << 30)


def test_both_containers_see_the_same_gpu_and_number_processes_alike() -> None:
    """Case 98: one claim for both; no number of a process comes twice."""
    pod = Pod("pod-gpu.yaml")
    (claim,) = pod.spec["resourceClaims"]
    (template,) = [one for one in pod.documents if one["kind"] == "ResourceClaimTemplate"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    for container in (pod.sidecar, pod.engine):
        assert container["resources"]["claims"] == [{"name": claim["name"]}]
    (asked,) = template["spec"]["spec"]["devices"]["requests"]
    assert asked["exactly"]["count"] == int(pod.env(pod.sidecar)["KVFERRY_TP_SIZE"])
    assert pod.spec["shareProcessNamespace"] is True
    assert "shareProcessNamespace" not in Pod("pod.yaml").spec, "on CPU nobody needs it"
