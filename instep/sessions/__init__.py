"""Session files of coding agents → conversations: readers, redaction, selection, and the report of it all."""

from instep.sessions.build import build, load
from instep.sessions.report import ReadReport

__all__ = ["ReadReport", "build", "load"]
