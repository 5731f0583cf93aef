"""What actors must know of a run's LoRA adapters before the first one comes."""

from dataclasses import dataclass

from penstock.common.wire.ids import LARGEST
from penstock.common.wire.limits import MOST_ADAPTER_RANK, check_names, check_range


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The LoRA adapters that are published in place of whole weights; the scale is `alpha` / `rank`.

    `modules` are the last parts of the names of the layers that have one, such as q_proj.
    """

    rank: int
    alpha: int
    modules: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raise MalformedMessage for a rank that vLLM has not, 1 to 512, an alpha below 1, or a name of
        over 200 characters."""
        check_range("the rank of an adapter", self.rank, 1, MOST_ADAPTER_RANK)
        check_range("the alpha of an adapter", self.alpha, 1, LARGEST)
        check_names("layer", self.modules)
