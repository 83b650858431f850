"""The tree of errors, which is the table of exit codes.

    DraftgaugeError              exit code
    ├── InputError               1   something that was given is wrong: yours to fix
    │   ├── CheckpointError          a drafter file: damaged, incomplete, missing or mis-shaped tensors
    │   │   └── FamilyError          the tensors of a drafter family that this version cannot compute
    │   ├── WiringError              a choice that turns weights into a function: unknown or contradictory
    │   ├── TargetError              the target model: not found, not readable, not as recorded
    │   ├── RecordingError           a recording: damaged, incomplete, or not fitting the drafter
    │   ├── PromptError              a prompt file
    │   ├── RunError                 a run directory, or two runs that cannot be compared
    │   ├── StoreError               a file or folder of ours: locked, full, changed under us
    │   ├── FleetError               a fleet or plan file, or a machine that refuses for good
    │   └── EngineError              a serving engine: not known, refusing, or not to be measured
    │       └── AnswerError              one answer of an engine that cannot be used; the others go on
    ├── IncompleteError          4   measured, but a part is missing or a gate failed
    └── UnfinishedError          5   a machine or disk stopped it: the same command goes on
        ├── ConnectionLostError      a connection ended before its work did
        └── BeingWrittenError        a file is still being written, or changed while it was read

Exit code 0 is success, 2 wrong usage of the command line, 3 an error of ours, 130 an interruption.
A message names the thing and its value, says what was expected, and ends with what helps.
"""


class DraftgaugeError(Exception):
    """Everything that this package raises on purpose."""

    exit_code = 1


class InputError(DraftgaugeError):
    """Something that was given is wrong; the message says what to change."""


class CheckpointError(InputError):
    """A drafter file is damaged, incomplete, still being written, or lacks tensors."""


class FamilyError(CheckpointError):
    """The tensors belong to a drafter family that is not implemented; it is named, never approximated."""


class WiringError(InputError):
    """A field of the wiring is unknown, impossible, or contradicts the tensors."""


class TargetError(InputError):
    """The target model cannot be found or read, or is not the one that was recorded."""


class RecordingError(InputError):
    """A recording is damaged or incomplete, or does not fit what was asked of it."""


class PromptError(InputError):
    """A prompt file cannot be understood; the message names file and line."""


class RunError(InputError):
    """A run directory cannot be read, or two runs cannot be compared."""


class StoreError(InputError):
    """A file or folder of ours is locked, cannot be written, or changed while it was read."""


class IncompleteError(DraftgaugeError):
    """The measurement was made, but a part of it is missing or a gate failed."""

    exit_code = 4


class FleetError(InputError):
    """A fleet or plan file is wrong, or a machine refuses in a way that trying again does not change."""


class UnfinishedError(DraftgaugeError):
    """A machine, a connection or a disk stopped the work; the same command goes on where it stopped."""

    exit_code = 5


class ConnectionLostError(UnfinishedError):
    """A connection ended before its work did; trying again is worth it at once."""


class BeingWrittenError(UnfinishedError):
    """A file is still being written, or changed while it was read; its writer has to finish first."""


class EngineError(InputError):
    """A serving engine is not one of those known, refuses, or answers in a way that cannot be measured."""


class AnswerError(EngineError):
    """One answer of an engine cannot be used; those to other prompts can."""


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]
