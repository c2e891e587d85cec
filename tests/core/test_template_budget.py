"""Templates that loop, grow or pad without end are stopped before they cost anything; honest ones never notice."""

from typing import Any

import pytest
from jinja2.exceptions import SecurityError

from core.chat_template import Budget, BudgetedEnvironment, BudgetExceeded, use_budget

MESSAGES = [{"role": "user", "content": "Hi"}]


def render(
    template: str, messages: list[dict[str, Any]], num_operations: int = 50_000, num_chars: int = 1_000_000
) -> str:
    with use_budget(Budget(num_operations, num_chars)):
        return BudgetedEnvironment().from_string(template).render(messages=messages)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% for a in range(90000) %}{% for b in range(90000) if false %}{% endfor %}{% endfor %}",
        "{% for a in range(90000) %}{% set x = range(90000) | select('none') | first %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [[1]] recursive %}{{ loop([a, a]) }}{% endfor %}",
        "{% for a in range(90000) %}" + "x" * 2000 + "{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s * 9 %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = (n.s, n.s) %}{% endfor %}",
        "{% set n = namespace(s={}) %}{% for i in range(60) %}{% set n.s = {'a': n.s, 'b': n.s} %}{% endfor %}",
        "{% set n = namespace(s={}) %}{% for i in range(60) %}{% set n.s = dict(a=n.s, b=n.s) %}{% endfor %}",
        "{% set n = namespace(i=3) %}{% for i in range(60) %}{% set n.i = n.i * n.i %}{% endfor %}",
        "{{ 9 ** 99999 }}",
        "{{ 'x' * 9999999999 }}",
        "{{ [1] * 9999999999 }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{{ 'x' | center(9999999999) }}",
        "{{ 1.5 | round(999999999) }}",
        "{{ [1] | batch(9999999999, 0) | list }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 9999999999) }}",
        "{{ ('{0}' * 9000).format('x' * 90000) }}",
        "{{ ('x' * 90000).replace('x', 'y' * 90000) }}",
        "{{ ('x' * 90000) | replace('x', 'y' * 90000) }}",
        "{{ ('x' * 90000) | replace(new='y' * 90000, old='x') }}",
        "{{ messages | tojson(separators=('y' * 90000, ':')) }}",
        "{{ ('x ' * 9000) | wordwrap(1, wrapstring='y' * 90000) }}",
        "{{ ('x' * 90000).join('y' * 90000) }}",
        "{{ range(90000) | map('string') | join('y' * 90000) }}",
        "{{ ('x\n' * 9000) | indent(9000) }}",
        "{{ messages | tojson(indent=9999999999) }}",
        "{{ 'x\t'.expandtabs(9999999999) }}",
    ],
)
def test_template_that_does_too_much_is_stopped(template: str) -> None:
    with pytest.raises((SecurityError, RecursionError)):
        render(template, MESSAGES)


def test_each_turn_and_call_is_an_operation() -> None:
    template = "{% for m in messages %}{{ m.role.upper() }}{% endfor %}"
    assert render(template, MESSAGES * 10, num_operations=50) == "USER" * 10
    with pytest.raises(BudgetExceeded):
        render(template, MESSAGES * 10, num_operations=25)


def test_text_between_the_tags_counts_at_each_turn() -> None:
    template = "{% for m in messages %}" + "x" * 100 + "{% endfor %}"
    assert len(render(template, MESSAGES * 10, num_chars=1000)) == 1000
    with pytest.raises(BudgetExceeded):
        render(template, MESSAGES * 10, num_chars=999)


def test_generators_are_still_joined_whole_when_measured() -> None:
    assert render("{{ messages | map(attribute='role') | join('+') }}", MESSAGES * 2) == "user+user"
    assert render("{{ '+'.join(messages | map(attribute='role')) }}", MESSAGES * 2) == "user+user"


def test_namespaces_may_hold_each_other_without_being_written_out() -> None:
    template = "{% set a = namespace() %}{% set a.b = a %}{{ a }}"
    assert render(template, MESSAGES) == "<Namespace>"
