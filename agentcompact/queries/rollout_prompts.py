"""The bank of general requests about a text that teacher rollouts answer: requests times response instructions."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentcompact.errors import SettingsError

PROMPTS_FILE = "rollout_prompts.json"


class PromptBank(BaseModel):
    """Requests about content, organisation and style; how to answer; and requests about a focus ("{focus}")."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: tuple[str, ...] = Field(min_length=1)
    instructions: tuple[str, ...] = Field(min_length=1)
    focus_requests: tuple[str, ...] = ()

    def prompts(self, count: int | None = None, focus: str | None = None) -> list[str]:
        """Return `count` prompts, each a request with an instruction behind it, or all there are.

        A focus adds its requests to the others. Fewer than all are taken evenly over requests and instructions: the
        first take each request once, with another instruction each, before a request comes a second time.
        """
        about = (focus or "").strip()
        focused = [text.replace("{focus}", about) for text in self.focus_requests] if about else []
        requests = [*focused, *self.requests]
        pairs = [
            f"{request} {self.instructions[(number + turn) % len(self.instructions)]}"
            for turn in range(len(self.instructions))
            for number, request in enumerate(requests)
        ]
        return pairs if count is None else pairs[:count]


def read_prompt_bank(path: str | None = None) -> PromptBank:
    """Read a bank from a JSON file with "requests", "instructions" and "focus_requests", or the built-in one.

    Raises SettingsError where the file cannot be read or holds something else.
    """
    try:
        if path is None:
            text = (files("agentcompact.queries") / "data" / PROMPTS_FILE).read_text(encoding="utf-8")
        else:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        return PromptBank.model_validate(json.loads(text))
    except OSError as error:
        raise SettingsError(f"prompts_file={path}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"prompts_file={path}: {where}: {first['msg']}") from error
    except ValueError as error:
        raise SettingsError(f"prompts_file={path} is no JSON: {error}") from error
