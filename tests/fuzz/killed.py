"""Runs an action in a child that dies at its n-th step, and tells whether it died before it was done.

A step is a call of the operating system made from Python (`os.*`, a file's methods, fcntl), or a line of the
code that switches. The kernel keeps what a killed process wrote, so that every n is one prefix of the system
calls.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

#: The functions whose lines are steps too: ctypes' calls are seen there only.
_LINES = ("_switch", "_put", "_exchange")
_SYSTEM = ("posix", "_io", "io", "fcntl")


def killed_at(step: int, action: Callable[[], object]) -> bool:
    """True when the child was killed at that step; False when the action has fewer."""
    child = os.fork()
    if child == 0:
        try:
            _dying(step, action)
        except BaseException:
            traceback.print_exc()
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"the child died of signal {os.WTERMSIG(status)}"
        return True
    assert os.WEXITSTATUS(status) == 0, "the action failed in the child; see its traceback"
    return False


def _dying(step: int, action: Callable[[], object]) -> None:
    left = [step]

    def one_step() -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def called(frame: FrameType, event: str, argument: Any) -> None:
        if (
            event == "c_call"
            and (getattr(argument, "__module__", None) or type(argument.__self__).__module__) in _SYSTEM
        ):
            one_step()

    def traced(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_name not in _LINES:
            return None
        if event == "line":
            one_step()
        return traced

    assert threading.current_thread() is threading.main_thread()
    sys.setprofile(called)
    sys.settrace(traced)
    try:
        action()
    finally:
        sys.settrace(None)
        sys.setprofile(None)
