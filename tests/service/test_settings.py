"""Where a setting comes from, and what is said when it cannot be."""

from pathlib import Path

import pytest

from kvferry.cli.main import main
from kvferry.proto.errors import ConfigError
from kvferry.settings import Settings, _fix, describe_default, load, unknown_environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of whoever runs the tests."""
    for name in Settings.model_fields:
        monkeypatch.delenv("KVFERRY_" + name.upper(), raising=False)
    monkeypatch.delenv("KVFERRY_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_flag_wins_over_the_environment_which_wins_over_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = write(tmp_path / "k.toml", 'tp_size = 2\nlease = "20s"\nhost_memory = "1GiB"\n')
    monkeypatch.setenv("KVFERRY_TP_SIZE", "4")
    monkeypatch.setenv("KVFERRY_LEASE", "30s")
    settings = load({"tp_size": "8"}, config)
    assert (settings.tp_size, settings.lease, settings.host_memory) == (8, 30.0, 1 << 30)
    assert settings.kill_grace == 2.0


def test_the_file_is_the_named_one_else_that_of_the_environment_else_that_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path / "kvferry.toml", "tp_size = 2\n")
    assert load({}).tp_size == 2
    monkeypatch.setenv("KVFERRY_CONFIG", write(tmp_path / "env.toml", "tp_size = 3\n"))
    assert load({}).tp_size == 3
    assert load({}, write(tmp_path / "named.toml", "tp_size = 4\n")).tp_size == 4


def test_an_empty_variable_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_TP_SIZE", "")
    assert load({}).tp_size == 1


def test_gpus_are_named_alike_in_flag_environment_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By UUID or number, in the order of the ranks; none named: rank r has visible GPU r."""
    two = {"tp_size": "2", "device": "cuda"}
    assert load({**two, "devices": "GPU-a, 1"}).devices == ("GPU-a", "1")
    assert load({**two}, write(tmp_path / "k.toml", 'devices = ["GPU-a", 1]\n')).devices == ("GPU-a", "1")
    monkeypatch.setenv("KVFERRY_DEVICES", "GPU-a,GPU-b")
    settings = load(two)
    assert [settings.gpu_of(rank) for rank in range(2)] == ["GPU-a", "GPU-b"]
    monkeypatch.delenv("KVFERRY_DEVICES")
    assert [load(two).gpu_of(rank) for rank in range(2)] == ["0", "1"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"devices": "0"}, ["'cpu'"]),
        ({"device": "cuda", "devices": "0,1"}, ["2 GPUs for 1 rank"]),
        ({"device": "cuda", "tp_size": "2", "devices": "0,0"}, ["twice"]),
        ({"device": "cuda", "tp_size": "2", "devices": "0,"}, ["no GPU"]),
        ({"device": "cuda", "devices": "0", "pin": "maybe"}, ["pin", "maybe"]),
    ],
)
def test_gpus_that_do_not_fit_the_ranks_are_refused(flags: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags)
    assert caught.value.code in ("settings.devices", "settings.pin") and caught.value.fix
    assert all(word in str(caught.value) for word in words)


def test_an_empty_run_dir_is_refused_but_for_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would be the working directory."""
    with pytest.raises(ConfigError, match=r"settings\.run_dir: --run-dir: '' is no directory"):
        load({"run_dir": ""})
    with pytest.raises(ConfigError, match=r"settings\.run_dir: run_dir in .*k\.toml: '' is no directory"):
        load({}, write(tmp_path / "k.toml", 'run_dir = ""\n'))
    monkeypatch.setenv("KVFERRY_RUN_DIR", "")
    assert load({}).run_dir is None


@pytest.mark.parametrize(
    ("toml", "code", "words"),
    [
        ("tp_sise = 2\n", "settings.unknown", ["tp_sise", "did you mean tp_size"]),
        ("tp_size = true\n", "settings.tp_size", ["tp_size in", "true is no number"]),
        ("restarts = false\n", "settings.restarts", ["false is no number"]),
        ("lease_share = true\n", "settings.lease_share", ["true is no number"]),
        ("tp_size = 0\n", "settings.tp_size", ["tp_size in", "greater than or equal to 1", "0"]),
        ("tp_size = 65\n", "settings.tp_size", ["64", "65"]),
        ('host_memory = "0"\n', "settings.host_memory", ["greater than 0", "0"]),
        ("host_memory = -5\n", "settings.host_memory", ["greater than 0", "-5"]),
        ('host_memory = "8G"\n', "settings.host_memory", ["8GiB", "8GB"]),
        ('host_memory = "8KiB"\n', "settings.host_memory", ["8.0 KiB", "12.0 KiB"]),
        ('host_memory = "1MiB"\ntp_size = 64\nlease_share = 0\n', "settings.lease_share", ["greater than 0"]),
        ('device = "tpu"\n', "settings.device", ["'cpu'", "'tpu'"]),
        ('lease = "soon"\n', "settings.lease", ["500ms"]),
        ("lease_share = nan\n", "settings.lease_share", ["nan", "above 0", "at most 1"]),
        ("lease_share = inf\n", "settings.lease_share", ["inf"]),
        ("kill_grace = nan\n", "settings.kill_grace", ["above 0"]),
        ("tp_size = \n", "settings.file", ["not TOML"]),
        ("[cache]\ntp_size = 2\n", "settings.unknown", ["cache"]),
    ],
)
def test_an_impossible_file_is_refused_by_name_with_both_values(
    tmp_path: Path, toml: str, code: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        load({}, write(tmp_path / "k.toml", toml))
    assert error.value.code == code
    assert error.value.fix
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("setting", "value", "fix"),
    [
        ("tp_size", "0", "give a number of at least 1 and at most 64 (default 1)"),
        ("lease_share", "2", "give a number above 0 and at most 1 (default 0.5)"),
        ("restarts", "-1", "give a number of at least 0 and at most 1,000,000 (default 5)"),
        ("host_memory", "8G", "give a size above 0, as 8GiB, 512MiB, 8GB or in bytes (default 4GiB)"),
        ("lease", "0", "give a time above 0, at most an hour, as 500ms, 10s, 2m or in seconds (default 10s)"),
        ("device", "tpu", "give one of cpu, cuda"),
        ("run_dir", "", "name a directory that you may write, or leave it out for the default"),
        ("keep", "perhaps", "give true or false"),
    ],
)
def test_the_fix_says_what_to_give_and_not_what_the_setting_is(setting: str, value: str, fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        load({setting: value})
    assert error.value.fix == fix


def test_every_setting_has_a_fix_of_its_kind() -> None:
    for name in Settings.model_fields:
        assert _fix(name).startswith(("give ", "name ")) and "any size" not in _fix(name), name


def test_a_missing_file_is_refused_when_it_was_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"cannot read /nowhere/k\.toml"):
        load({}, "/nowhere/k.toml")


def test_the_refusal_says_which_source_was_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--tp-size"):
        load({"tp_size": "none"})
    monkeypatch.setenv("KVFERRY_TP_SIZE", "none")
    with pytest.raises(ConfigError, match="KVFERRY_TP_SIZE"):
        load({})


def test_host_memory_is_the_total_and_shares_are_whole_pages() -> None:
    """Case 104: sizes are totals; per-rank sizes follow from them."""
    settings = load({"host_memory": "1GiB", "tp_size": "3"})
    assert settings.rank_bytes % 4096 == 0
    assert (1 << 30) - 3 * 4096 < settings.rank_bytes * 3 <= 1 << 30


def test_a_variable_that_names_nothing_is_told_with_the_nearest_name() -> None:
    strange = unknown_environment({"KVFERRY_HOST_MEMROY": "1", "KVFERRY_TP_SIZE": "1", "KVFERRY_CONFIG": "x", "A": ""})
    assert strange == ["KVFERRY_HOST_MEMROY; did you mean KVFERRY_HOST_MEMORY?"]


def test_what_kubernetes_makes_of_a_service_named_kvferry_is_nobodys_mistake() -> None:
    names = ["KVFERRY_PORT", "KVFERRY_PORT_80_TCP", "KVFERRY_PORT_80_TCP_ADDR", "KVFERRY_SERVICE_HOST"]
    assert unknown_environment(dict.fromkeys(names, "x")) == names


def test_the_settings_that_there_are_are_listed_in_order(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load({}, write(tmp_path / "k.toml", "frobnicate = 2\n"))
    assert error.value.fix == "known: " + ", ".join(sorted(Settings.model_fields))


def test_a_bad_setting_is_two_lines_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--host-memory", "8G"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[0].startswith("settings.host_memory: --host-memory: '8G' is no size")
    assert said[1].startswith("  fix: ")


def test_help_shows_every_setting_with_its_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["up", "--help"])
    assert done.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in Settings.model_fields:
        assert "--" + name.replace("_", "-") in text
        assert f"[KVFERRY_{name.upper()}]" in text
    assert "(default 4GiB)" in text


def test_a_run_dir_too_long_for_a_socket_is_refused_with_both_lengths() -> None:
    with pytest.raises(ConfigError, match="107"):
        load({"run_dir": "/tmp/" + "x" * 120}).directory()


def test_the_manual_lists_every_setting_as_it_is() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    for name, field in Settings.model_fields.items():
        default = "see below" if field.default is None else describe_default(name)
        flag = "--" + name.replace("_", "-")
        assert f"| `{name}` | `{flag}` | `KVFERRY_{name.upper()}` | {default} | {field.description} |" in text
