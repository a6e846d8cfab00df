"""What `kv_connector_extra_config` may say."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvplan import engines

_KINDS = ("nixl", "mooncake")


@dataclasses.dataclass(frozen=True)
class Settings:
    """`kv_connector_extra_config`, checked.

    Attributes:
        engine: "nixl" or "mooncake". Both sides must say the same.
        engine_options: arguments of `kvplan.engines.NixlEngine` or `MooncakeEngine`. Mooncake's `hostname` is that of
            the side channel by default.
        host, port: of the side channel. By default VLLM_NIXL_SIDE_CHANNEL_HOST and VLLM_NIXL_SIDE_CHANNEL_PORT, as for
            NixlConnector. The number of the data-parallel engine is added to the port.
        lease: seconds for which the prefill side holds blocks that nobody asks for.
        timeout: seconds to wait for an answer on the side channel.
    """

    engine: str
    engine_options: dict[str, Any]
    host: str
    port: int
    lease: float
    timeout: float

    @classmethod
    def of(cls, vllm_config: Any) -> Settings:
        """The settings of a vLLM engine.

        Raises:
            ValueError: a setting is unknown, or of the wrong type or value.
        """
        from vllm import envs

        given = dict(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        found = cls(
            engine=given.pop("engine", "nixl"),
            engine_options=given.pop("engine_options", {}),
            host=given.pop("side_channel_host", envs.VLLM_NIXL_SIDE_CHANNEL_HOST),
            port=given.pop("side_channel_port", envs.VLLM_NIXL_SIDE_CHANNEL_PORT),
            lease=given.pop("kv_lease_duration", 30),
            timeout=given.pop("side_channel_timeout", 10),
        )
        if given:
            raise ValueError(
                f"kv_connector_extra_config has {', '.join(map(repr, sorted(given)))}, which KvplanConnector does not "
                f"know. It knows engine, engine_options, side_channel_host, side_channel_port, side_channel_timeout "
                f"and kv_lease_duration"
            )
        if found.engine not in _KINDS:
            raise ValueError(f"engine is {found.engine!r} in kv_connector_extra_config; it must be one of {_KINDS}")
        if not isinstance(found.engine_options, dict):
            raise ValueError(f"engine_options must be a mapping, not {found.engine_options!r}")
        if not isinstance(found.host, str) or not found.host:
            raise ValueError(f"side_channel_host must be a name or an address, not {found.host!r}")
        _check_number("side_channel_port", found.port, 1, 65535, whole=True)
        _check_number("kv_lease_duration", found.lease, 1, 1e9)
        _check_number("side_channel_timeout", found.timeout, 0.1, 1e9)
        index = getattr(vllm_config.parallel_config, "data_parallel_index", 0)
        return dataclasses.replace(found, port=found.port + index)

    def make_engine(self) -> engines.Engine:
        """The transfer engine of a worker.

        Raises:
            ValueError: engine_options has an argument that the engine does not take; or as the engine itself.
        """
        options = self.engine_options
        if self.engine == "mooncake":  # it too must be told how others reach this machine
            options = {"hostname": self.host} | options
        try:
            return engines.KINDS[self.engine](**options)
        except TypeError as error:
            raise ValueError(f"engine_options of the {self.engine} engine: {error}") from error


def _check_number(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> None:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        what = "an integer" if whole else "a number"
        raise ValueError(f"{name} must be {what} from {low:g} to {high:g}, not {value!r}")
