"""Many devices: how a training step is divided among them.

Plain numbers in, a `Strategy` out; knows no torch.
"""

from effcompile.ir.strategy import AXES, Axis, Strategy, StrategyFields

__all__ = ["AXES", "Axis", "Strategy", "StrategyFields"]
