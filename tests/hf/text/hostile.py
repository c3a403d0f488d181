"""Chat templates that loop, grow, recurse, or raise whatever Python can."""

from __future__ import annotations

_GROW = "{% set ns = namespace(s='x') %}{% for i in range(100) %}"

HOSTILE = {
    # without end
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested_ranges": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "nested_silent": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% if a == b %}x{% endif %}{% endfor %}{% endfor %}",
    "product": "{% for a in ('a' * 9999)|list %}{% for b in ('b' * 9999)|list %}{{ a }}{{ b }}"
    "{% endfor %}{% endfor %}",
    "batches": "{{ range(99999)|batch(1)|list|length }}{% for i in range(99999) %}"
    "{% set x = range(99999)|list %}{% endfor %}",
    "power": "{{ 9 ** 9 ** 9 ** 9 }}",
    "power_of_power": "{{ (2 ** 9999999999) % 7 }}",
    "integer_as_text": "{{ (10 ** 4000) * 10 ** 4000 }}",
    "sorting": "{% for i in range(99999) %}{{ (range(99999)|list)|sort|length }}{% endfor %}",
    "regex_like": "{{ ('a' * 50000)|replace('a', 'a' * 1000)|length }}",
    # too much
    "string": "{{ 'a' * 10 ** 10 }}",
    "string_silent": "{% set x = 'a' * 10 ** 9 %}{{ x|length }}",
    "list": "{{ [0] * 10 ** 9 }}",
    "tuple": "{{ ((0,) * 10 ** 9)|length }}",
    "output": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "percent_width": "{{ '%999999999d' % 1 }}",
    "percent_star": "{{ '%*d' % (2000000000, 1) }}",
    "format_width": "{{ '{:999999999}'.format(1) }}",
    "format_filter": "{{ '%99999999999d'|format(1) }}",
    "center": "{{ 'a'|center(10 ** 9) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "zfill": "{{ 'a'.zfill(10 ** 9) }}",
    "indent": "{{ ('a\\n' * 50000)|indent(100000) }}",
    "join": "{{ (['a' * 100000] * 100000)|join('b' * 1000) }}",
    "wordwrap": "{{ ('a ' * 500000)|wordwrap(1, wrapstring='x' * 1000) }}",
    "tojson_indent": "{{ range(99999)|list|tojson(indent=10000) }}",
    "expandtabs": "{{ ('\\t' * 100000).expandtabs(1000000) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "namespace": _GROW + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "namespace_lists": "{% set ns = namespace(l=[0]) %}{% for i in range(60) %}"
    "{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l|length }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "bytes": "{{ ('a' * 10 ** 9).encode('utf-32') }}",
    # recursion
    "macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro_twice": "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "macro_tree": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "recursive_loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "nested_brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested_ifs": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "self": "{% block b %}{{ self.b() }}{% endblock %}",
    # errors of all kinds
    "zero": "{{ 1 / 0 }}",
    "lookup": "{{ [1][5] }}{{ {}['a'] }}{{ 'a'.encode('nonsense') }}",
    "index": "{{ messages[99].role }}",
    "undefined": "{{ nothing.at.all }}",
    "undefined_filter": "{{ 1|frobnicate }}",
    "undefined_function": "{{ frobnicate() }}",
    "overflow": "{{ 2.0 ** 99999 }}",
    "overflow_range": "{{ range(2 ** 70) }}",
    "value": "{{ 'x'|int(base=99) }}{{ '%q' % 1 }}",
    "type": "{{ 'a' + 1 }}",
    "json_type": "{{ namespace|tojson }}",
    "raise": "{{ raise_exception('no such role\\n' * 1000) }}",
    "raise_nothing": "{{ raise_exception() }}",
    "unicode": "{{ '\\ud800' }}",
    "unicode_error": "{{ '\\ud800'.encode('utf-8') }}",
    "strftime": "{{ strftime_now('%' * 100000 ~ 'Y') }}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "format_attributes": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "import": "{% import 'os' as os %}{{ os.system('true') }}",
    "include": "{% include '/etc/passwd' %}",
    "extends": "{% extends messages[0].content %}",
    "mutation": "{{ messages.append(1) }}",
    "namespace_dunder": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "syntax": "{% for %}",
    "unclosed": "{{ ",
    "unknown_tag": "{% frobnicate %}",
    "break_outside": "{% break %}",
}
