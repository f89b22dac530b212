import re
from datetime import datetime

import pytest

from paceline.errors import PacelineError
from paceline.text.chat_template import render_chat_template

USER = [{"role": "user", "content": "hi <b>"}]


def test_messages_and_variables_reach_the_template() -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    rendered = render_chat_template(template, USER, bos_token="<s>", eos_token="</s>")
    assert rendered == "<s>[user] hi <b></s>"


def test_the_generation_prompt_is_the_templates_choice() -> None:
    template = "{{ messages[0].content }}{% if add_generation_prompt %}|assistant{% endif %}"
    assert render_chat_template(template, USER, add_generation_prompt=True) == "hi <b>|assistant"
    assert render_chat_template(template, USER, add_generation_prompt=False) == "hi <b>"


def test_blocks_leave_no_white_space_of_their_own() -> None:
    template = "{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\n"
    assert render_chat_template(template, USER) == "x\n"


def test_json_is_not_escaped_for_html() -> None:
    rendered = render_chat_template("{{ value | tojson }}{{ value | tojson(indent=1) }}", USER, value={"a": "<é&'"})
    assert rendered == '{"a": "<é&\'"}{\n "a": "<é&\'"\n}'


def test_the_date_is_available() -> None:
    rendered = render_chat_template("{{ strftime_now('%Y-%m-%d') }}", USER)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", rendered)
    assert abs((datetime.now() - datetime.strptime(rendered, "%Y-%m-%d")).days) <= 1


def test_loop_controls_and_generation_blocks_are_understood() -> None:
    template = "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}"
    template += "{% endfor %}{% generation %}body{% endgeneration %}"
    assert render_chat_template(template, USER) == "02body"


def test_a_model_without_template_is_told_so() -> None:
    with pytest.raises(PacelineError, match="no chat template") as error:
        render_chat_template(None, USER)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages.missing.attribute }}", "missing"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ messages.__class__.__mro__ }}", "__class__"),
    ],
)
def test_a_template_that_fails_gives_one_clear_line(template: str, reason: str) -> None:
    with pytest.raises(PacelineError, match=re.escape(reason)) as error:
        render_chat_template(template, USER)
    assert "\n" not in str(error.value)
    assert "user" in str(error.value)
