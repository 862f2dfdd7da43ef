"""All settings of a sidecar, from flags, environment, file and defaults, in this order.

    kvferry up --host-memory 8GiB       a flag wins over
    KVFERRY_HOST_MEMORY=8GiB            the environment, which wins over
    host_memory = "8GiB"                kvferry.toml (--config FILE, else $KVFERRY_CONFIG, else ./kvferry.toml), over
    the defaults below

The help of `kvferry up` is made from the descriptions here. A key that nobody knows is refused where it can
only be a mistake (flags, file); in the environment it is a warning, because others put variables there too
(Kubernetes makes KVFERRY_PORT of a service that is named kvferry).
"""

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from kvferry.net.paths import RunDir
from kvferry.proto import limits
from kvferry.proto.errors import ConfigError
from kvferry.units import counted, format_bytes, parse_bytes, parse_seconds

ENV_PREFIX: Final = "KVFERRY_"
# Read by other parts of kvferry, or naming the file itself: no fields of Settings, and no mistakes.
OTHER_ENV: Final = frozenset({"KVFERRY_CONFIG"})
# The least a rank's share can be: the pool file's own header page, and a slot of a header page and a payload page.
MIN_RANK_BYTES: Final = 3 * limits.PAGE_BYTES

SIZES: Final = ("host_memory", "in_flight")
TIMES: Final = ("lease", "job_deadline", "load_deadline", "kill_grace")


def _number(given: object) -> object:
    if isinstance(given, bool):  # would be taken for 0 or 1
        raise ValueError(f"{str(given).lower()} is no number")
    return given


Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]


def _not_empty(text: object) -> object:
    if text == "":  # would be the working directory, which nobody means by it
        raise ValueError("'' is no directory; name one, or leave it out for the default")
    return text


Directory = Annotated[Path | None, BeforeValidator(_not_empty)]


def _names(given: object) -> object:
    """`a,b` or a list of texts and numbers, as names."""
    if isinstance(given, str):
        given = [name.strip() for name in given.split(",")] if given.strip() else []
    if not isinstance(given, list | tuple) or not all(isinstance(name, str | int) for name in given):
        raise ValueError("must be GPUs by UUID or number, with commas between them")
    names = tuple(str(name) for name in given)
    if not all(names) or len(set(names)) < len(names):
        raise ValueError("names no GPU, or one twice: each rank has a GPU of its own")
    return names


Gpus = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)]


class Settings(BaseSettings):
    """What may be set. Sizes and times take units (8GiB, 500ms)."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, validate_default=True
    )

    run_dir: Directory = Field(
        None, description="directory of sockets and lock; default $XDG_RUNTIME_DIR/kvferry, else a directory in /tmp"
    )
    tp_size: Int = Field(
        1, ge=1, le=limits.MAX_RANKS, description="ranks of the engines that will attach (their tensor-parallel size)"
    )
    host_memory: Bytes = Field(
        parse_bytes("4GiB"), gt=0, description="memory of the pool in /dev/shm, the total over all ranks"
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the engines' KV cache lies")
    devices: Gpus = Field(
        (), description="the GPU of each rank, by UUID or number, with commas; default: rank r has visible GPU r"
    )
    pin: Literal["required", "wanted"] = Field(
        "required", description="a pool that the GPU's driver does not pin is refused, or used all the same, slower"
    )
    lease: Seconds = Field(10.0, gt=0, le=3600, description="how long a lookup's hits stay pinned without a renewal")
    lease_share: Float = Field(
        0.5, gt=0, le=1, allow_inf_nan=False, description="the part of the pool that leases may pin"
    )
    job_deadline: Seconds = Field(
        30.0, gt=0, le=3600, description="after this, and the time its bytes take, an accepted transfer is given up"
    )
    load_deadline: Seconds = Field(5.0, gt=0, le=3600, description="the same for a load, if it is shorter")
    kill_grace: Seconds = Field(2.0, gt=0, le=3600, description="after a cancel, a worker without a word is killed")
    in_flight: Bytes = Field(
        parse_bytes("1GiB"),
        gt=0,
        description="bytes of stores that one engine may have under way; one block always may, loads are not bounded",
    )
    restarts: Int = Field(5, ge=0, le=1_000_000, description="deaths of the daemon within 30 s that are survived")
    keep: bool = Field(False, description="keep the pool on Ctrl-C too, for the next start")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what is logged to stderr")

    def gpu_of(self, rank: int) -> str:
        """UUID or number of a rank's GPU."""
        return self.devices[rank] if self.devices else str(rank)

    @property
    def rank_bytes(self) -> int:
        """Bytes of one rank's pool file, in whole pages."""
        return self.host_memory // self.tp_size // limits.PAGE_BYTES * limits.PAGE_BYTES

    def directory(self) -> RunDir:
        """The run directory; ConfigError if its sockets' names would be too long."""
        return RunDir.at(self.run_dir)


def load(flags: Mapping[str, Any], config: str | None = None) -> Settings:
    """The settings that `flags`, the environment and the file together give.

    ConfigError naming the setting, where it came from, what it was, and the fix.
    """
    path = _config_path(config)
    in_file = _read(path) if path else {}

    class Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=in_file)

    try:
        settings = Layered(**flags)
    except ValidationError as error:
        raise _named(error, flags, in_file, path) from None
    if settings.rank_bytes < MIN_RANK_BYTES:
        raise ConfigError(
            "settings.host_memory",
            f"{format_bytes(settings.host_memory)} over {counted(settings.tp_size, 'rank leaves', 'ranks leave')}"
            f" {format_bytes(settings.rank_bytes)} a rank; the smallest block needs {format_bytes(MIN_RANK_BYTES)}",
            "raise host_memory; it is the total over all ranks, and a useful pool holds many blocks",
        )
    if settings.devices and settings.device != "cuda":
        raise ConfigError(
            "settings.devices", f"GPUs are named, but the device is {settings.device!r}", "device = cuda, or no devices"
        )
    if settings.devices and len(settings.devices) != settings.tp_size:
        raise ConfigError(
            "settings.devices",
            f"{counted(len(settings.devices), 'GPU')} for {counted(settings.tp_size, 'rank')}",
            "name one GPU for each rank, in the order of the ranks",
        )
    return settings


def find_run_dir(flag: str | None = None, config: str | None = None) -> tuple[RunDir, str]:
    """The run directory alone, for commands that need nothing else; and a line on a file that was of no use, or "".

    Whatever else is set, well or badly, is the business of `kvferry up`: a health probe must not fail for it.
    ConfigError if the directory cannot be, or a file that was named and is needed cannot be read.
    """
    named = flag if flag is not None else os.environ.get(ENV_PREFIX + "RUN_DIR") or None
    path, told = _config_path(config), ""
    if named is None and path is not None:
        try:
            named = _read(path).get("run_dir")
        except ConfigError as error:
            if config or os.environ.get("KVFERRY_CONFIG"):
                raise
            told = f"{error.text}: ignored, as no setting but the run dir is needed here"
        if named is not None and (not isinstance(named, str) or not named):
            raise ConfigError("settings.run_dir", f"run_dir in {path}: {named!r} is no directory", _fix("run_dir"))
    if named == "":
        raise ConfigError("settings.run_dir", "--run-dir: '' is no directory", _fix("run_dir"))
    return RunDir.at(named), told


def unknown_environment(environ: Mapping[str, str] = os.environ) -> list[str]:
    """KVFERRY_* variables that name no setting, each with the nearest name."""
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields} | OTHER_ENV
    strange = sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in known)
    return [name + ("" if _of_kubernetes(name) else _nearest(name, known)) for name in strange]


def _of_kubernetes(name: str) -> bool:
    """Whether it is one that Kubernetes makes for a service named kvferry: nobody has mistyped it."""
    return name.startswith((ENV_PREFIX + "PORT", ENV_PREFIX + "SERVICE_"))


def _config_path(config: str | None) -> Path | None:
    named = config or os.environ.get("KVFERRY_CONFIG")
    if named:
        return Path(named)
    here = Path("kvferry.toml")
    return here if here.is_file() else None


def _read(path: Path) -> dict[str, Any]:
    try:
        items = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            "settings.file", f"cannot read {path}: {error.strerror}", "name a readable file with --config"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("settings.file", f"{path} is not TOML: {error}", "correct that line") from None
    return items


def _named(
    error: ValidationError, flags: Mapping[str, Any], in_file: Mapping[str, Any], path: Path | None
) -> ConfigError:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    if name in flags:
        where = "--" + name.replace("_", "-")
    elif ENV_PREFIX + name.upper() in os.environ:
        where = ENV_PREFIX + name.upper()
    elif name in in_file:
        where = f"{name} in {path}"
    else:
        where = name
    if first["type"] == "extra_forbidden":
        known = set(Settings.model_fields)
        return ConfigError(
            "settings.unknown",
            f"{where}: there is no such setting{_nearest(name, known)}",
            "known: " + ", ".join(sorted(known)),
        )
    text = first["msg"].removeprefix("Value error, ")
    given = first["input"]
    shown = "" if repr(given) in text else f", not {given!r}"
    return ConfigError("settings." + name, f"{where}: {text[:1].lower()}{text[1:]}{shown}", _fix(name))


def _fix(name: str) -> str:
    """What to give in place of what cannot be."""
    field = Settings.model_fields[name]
    if get_origin(field.annotation) is Literal:
        return "give one of " + ", ".join(map(str, get_args(field.annotation)))
    if field.annotation is bool:
        return "give true or false"
    if name == "run_dir":
        return "name a directory that you may write, or leave it out for the default"
    if name == "devices":
        return "name each rank's GPU once, as 0,1 or by UUID (`nvidia-smi -L`), or leave it out"
    low, high = _range(name)
    if name in SIZES:
        return f"give a size above 0, as 8GiB, 512MiB, 8GB or in bytes (default {describe_default(name)})"
    if name in TIMES:
        return (
            f"give a time above 0, at most an hour, as 500ms, 10s, 2m or in seconds (default {describe_default(name)})"
        )
    return f"give a number {low} and {high} (default {describe_default(name)})"


def _range(name: str) -> tuple[str, str]:
    """The bounds of a number in words."""
    low, high = "of any size", "of any size"
    for bound in Settings.model_fields[name].metadata:
        for word, text in (("ge", "of at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
            value = getattr(bound, word, None)
            if value is not None and word in ("ge", "gt"):
                low = f"{text} {value:,}"
            elif value is not None:
                high = f"{text} {value:,}"
    return low, high


def describe_default(name: str) -> str:
    """The default of a setting as people write it."""
    default = Settings.model_fields[name].default
    if default == ():
        return "none"
    if name in SIZES:
        return format_bytes(default).replace(".0 ", "")
    if name in TIMES:
        return f"{default:g}s"
    return str(default)


def _nearest(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""
