"""The narrowest stand-in for Transformer Engine's debug features: the namespace through which its layers ask."""

from typing import Any

from nvdlfw_inspect.base import BaseNamespaceAPI
from nvdlfw_inspect.registry import Registry


class Defaults:
    """What holds where no feature answers: FP8, and there is no need to ask again."""

    def fp8_gemm_enabled(self, config: Any, layer_name: str, gemm: str, iteration: int) -> tuple[bool, None]:
        return True, None


@Registry.register_namespace_api(namespace="transformer_engine")
class StandIn(BaseNamespaceAPI):
    def __init__(self) -> None:
        super().__init__()
        self._default_api_impl = Defaults()

    def input_assertions_hook(self, api_name: str, **kwargs: Any) -> None:
        assert "gemm" in kwargs

    def routing_condition(self, api_name: str, config: Any, layer_name: str, feature_obj: Any, **kwargs: Any) -> Any:
        return feature_obj.parse_config_and_api(config, gemm_parsing=True, tensor_parsing=False, **kwargs)

    def output_assertions_hook(self, api_name: str, ret: Any, **kwargs: Any) -> None:
        assert isinstance(ret, (bool, tuple))

    def is_multiple_feature_invocation_allowed(self, api_name: str) -> bool:
        return True
