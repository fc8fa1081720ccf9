"""Every error that flashgen raises on purpose. Each also derives from the builtin a Python user would catch.

A message states the rule, the values that broke it, and the next step.
"""

from __future__ import annotations


class FlashgenError(Exception):
    """Base of all errors raised on purpose."""


class InvalidProblem(FlashgenError, ValueError):
    """The problem contradicts itself, whatever the device: head counts, lengths, window bounds, types."""


class UnsupportedProblem(FlashgenError, ValueError):
    """No family, or not the named one, can compute the problem on the device."""


class UntunedProblem(FlashgenError, LookupError):
    """A table entry was demanded (strict), and none serves the problem."""


class UnknownDevice(FlashgenError, ValueError):
    """A device name that is neither a preset nor present."""


class InvalidSpace(FlashgenError, ValueError):
    """A search-space file breaks its schema or its grammar."""


class InvalidTable(FlashgenError, ValueError):
    """A tuned table breaks its schema, its integrity digest, or names something unknown."""


class InvalidBundle(FlashgenError, ValueError):
    """A bundle is damaged, altered, or not one; nothing of it was loaded."""


class InfeasibleVariant(FlashgenError, ValueError):
    """A variant violates a constraint of its space."""


class EmptySpace(FlashgenError, ValueError):
    """No variant of any family satisfies the constraints on the device."""


class MissingDependency(FlashgenError, RuntimeError):
    """Something outside the project is absent: NVRTC, CuPy, a driver, a host C++ compiler."""


class ConflictingInstall(FlashgenError, RuntimeError):
    """Two installed packages exclude each other, such as CuPy for CUDA 12 and for CUDA 13."""


class CompileError(FlashgenError, RuntimeError):
    """A compiler refused a source; the log is in the message."""


class LaunchError(FlashgenError, RuntimeError):
    """The driver refused or aborted a launch."""


class EmulationFault(FlashgenError, RuntimeError):
    """The emulated executor saw the kernel break a rule: a race, a deadlock, an access out of bounds."""


class NotWritable(FlashgenError, OSError):
    """The file system refused a table or a study: no permission, no space, or another writer holds it."""


class WorkerLost(FlashgenError, RuntimeError):
    """The measuring child died, hung or lost its CUDA context while running one trial.

    `reason` is one of `died`, `timed_out`, `poisoned` (a sticky CUDA error) and `not_started`.
    """

    def __init__(self, message: str, reason: str = "died") -> None:
        """A message that names the culprit, and the reason in one word."""
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[WorkerLost], tuple[str, str]]:
        """Survive a pickle with the reason."""
        return type(self), (str(self), self.reason)


class StudyMismatch(FlashgenError, ValueError):
    """A recorded study belongs to another space, problem or device."""


class PredictedEntryWarning(UserWarning):
    """An entry was ranked by the cost model and never timed."""


class UntunedProblemWarning(UserWarning):
    """No table entry covers the problem; the certified fallback runs."""


class BusyDeviceWarning(UserWarning):
    """The GPU is busy with other work; times measured now are too long."""


class HomeNotWritable(UserWarning):
    """FLASHGEN_HOME cannot be written; caches live in memory or in a temporary directory."""
