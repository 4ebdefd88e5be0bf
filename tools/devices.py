"""Real devices: how much memory they have, and how fast it is read."""

from dataclasses import dataclass

_GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """Memory in bytes and its peak bandwidth in bytes per second, as the maker states them."""

    name: str
    title: str
    memory: int
    bandwidth: float
    sm: int = 0  # compute capability, times ten; 0: no such GPU
    shared: bool = False  # the operating system and other programs live in the same memory

    @property
    def usable(self) -> int:
        """Bytes for a model: a quarter of shared memory is left to the system, a tenth of a GPU's own."""
        return int(self.memory * (0.75 if self.shared else 0.9))


def _row(
    name: str, title: str, gib: int, gb_per_second: float, sm: int = 0, *, shared: bool = False
) -> Device:
    return Device(name, title, gib * _GIB, gb_per_second * 1e9, sm, shared)


# Data sheets: NVIDIA's Jetson module and GeForce pages; laptops by their memory's width × rate.
DEVICES = {
    device.name: device
    for device in (
        _row("orin-nano", "Jetson Orin Nano 8 GB (Super mode)", 8, 102, 87, shared=True),
        _row("orin-nx-8", "Jetson Orin NX 8 GB", 8, 102.4, 87, shared=True),
        _row("orin-nx-16", "Jetson Orin NX 16 GB", 16, 102.4, 87, shared=True),
        _row("agx-orin-32", "Jetson AGX Orin 32 GB", 32, 204.8, 87, shared=True),
        _row("agx-orin-64", "Jetson AGX Orin 64 GB", 64, 204.8, 87, shared=True),
        _row("thor", "Jetson AGX Thor 128 GB", 128, 273, 110, shared=True),
        _row("rtx-3060", "GeForce RTX 3060 12 GB", 12, 360, 86),
        _row("rtx-3070", "GeForce RTX 3070 8 GB", 8, 448, 86),
        _row("rtx-3080", "GeForce RTX 3080 10 GB", 10, 760, 86),
        _row("rtx-3090", "GeForce RTX 3090 24 GB", 24, 936, 86),
        _row("rtx-4060", "GeForce RTX 4060 8 GB", 8, 272, 89),
        _row("rtx-4070", "GeForce RTX 4070 12 GB", 12, 504, 89),
        _row("rtx-4080", "GeForce RTX 4080 16 GB", 16, 716.8, 89),
        _row("rtx-4090", "GeForce RTX 4090 24 GB", 24, 1008, 89),
        _row("rtx-5060", "GeForce RTX 5060 8 GB", 8, 448, 120),
        _row("rtx-5070", "GeForce RTX 5070 12 GB", 12, 672, 120),
        _row("rtx-5080", "GeForce RTX 5080 16 GB", 16, 960, 120),
        _row("rtx-5090", "GeForce RTX 5090 32 GB", 32, 1792, 120),
        _row("laptop-ddr4-16", "Laptop, 16 GB DDR4-3200, two channels", 16, 51.2, shared=True),
        _row("laptop-ddr5-16", "Laptop, 16 GB DDR5-5600, two channels", 16, 89.6, shared=True),
        _row("laptop-ddr5-32", "Laptop, 32 GB DDR5-5600, two channels", 32, 89.6, shared=True),
        _row("laptop-lpddr5x-32", "Laptop, 32 GB LPDDR5X-7500, 128 bits", 32, 120, shared=True),
    )
}
