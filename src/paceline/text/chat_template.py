"""Rendering a model's chat template, in the environment that Hugging Face templates expect."""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import PacelineError


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's part for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own interface)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_chat_template(template: str | None, messages: list[dict[str, str]], **variables: Any) -> str:
    """The prompt text of a conversation. `variables`: bos_token, eos_token, add_generation_prompt, the template's own.

    Raises PacelineError if there is no template, or if it fails on these messages.
    """
    if template is None:
        raise PacelineError("the model has no chat template; send a plain prompt, or give a chat template")
    try:
        return _compiled(template).render(messages=messages, **variables)
    except TemplateError as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PacelineError(f"the chat template refused these messages ({reason}); {_remedy(messages)}") from error
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise PacelineError(
            f"the chat template failed ({type(error).__name__}: {error}); {_remedy(messages)}"
        ) from error


def _remedy(messages: list[dict[str, str]]) -> str:
    roles = ", ".join(str(message.get("role")) for message in messages) or "none"
    return f"check the template and the roles and their order (given: {roles})"


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes <, > and &, which would reach the model."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
