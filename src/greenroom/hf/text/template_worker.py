"""Render chat templates in a process: `python template_worker.py BYTES SECONDS PATH...`.

A chat template is a program by the author of the checkpoint: it may loop, or write without end. The
kernel limits this process to BYTES of address space, and to SECONDS of CPU time for each rendering.
The PATHs become Python's module search path. The process imports only jinja2 and the standard
library, so that it stays small.

It reads requests from standard input, and writes one answer to each. Both are lines of JSON:

    request: [template, variables, most characters of the result]
    answer:  [true if rendered, true if this process ends now, the rendered text or the error]
"""

import json
import math
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache

RETIRE_BYTES = 40 << 20  # a process that has become this large is replaced by a new one


class Dict:
    """Stand-in for `dict` in chat templates, with the constructor and `fromkeys` only."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


def environment():
    """Make a Jinja environment equal to the one in which transformers renders chat templates.

    The code follows `_compile_jinja_template` in transformers 5.23.
    """
    import jinja2
    import jinja2.ext
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """Jinja block {% generation %}, which renders its content unchanged.

        Chat templates use the block to mark the text that a model generates.
        """

        tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_content")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _content(self, caller):
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """Jinja namespace that refuses names that begin with an underscore."""

        def __init__(*args, **kwargs):  # `self` may be one of the names
            attributes = dict(*args[1:], **kwargs)
            for name in attributes:
                check(name)
            jinja2.utils.Namespace.__init__(args[0], attributes)

        def __setitem__(self, name, value):
            check(name)
            super().__setitem__(name, value)

    def check(name):
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    sandbox.globals["dict"], sandbox.globals["namespace"] = Dict(), Namespace
    return sandbox


def render(compiled, source, variables, most):
    """Render a chat template. Raises TemplateError for more than `most` characters of text."""
    from jinja2.exceptions import TemplateError

    pieces, left = [], most
    for piece in compiled(source).generate(**variables):
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            raise TemplateError(f"the rendered text has more than {most:,} characters")
    return "".join(pieces)


def answer(compiled, request):
    """Answer one request, a line of JSON, to render a chat template.

    Returns whether the template was rendered, whether memory ran out, and the rendered text or the
    error.
    """
    from jinja2.exceptions import TemplateError

    try:
        return True, False, render(compiled, *json.loads(request))
    except MemoryError:
        return False, True, "rendering needs too much memory"
    except TemplateError as error:
        return False, False, str(error) or type(error).__name__
    except BaseException as error:  # a template may raise any exception
        return False, False, f"{type(error).__name__}: {error}"


def main(limit, seconds, path):
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    compiled = lru_cache(1)(environment().from_string)
    for kind, most in (("AS", limit), ("CORE", 0), ("FSIZE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))
    while request := sys.stdin.buffer.readline():
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        allowed = math.ceil(used) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (allowed, resource.RLIM_INFINITY))
        done, last, text = answer(compiled, request)
        last = last or resident_bytes() > RETIRE_BYTES
        line = json.dumps([done, last, text], ensure_ascii=False) + "\n"
        sys.stdout.buffer.write(line.encode("utf-8", "surrogatepass"))
        sys.stdout.buffer.flush()
        if last:
            return


def resident_bytes():
    """Return the resident memory of this template process now, in bytes.

    (The peak that the kernel reports would include the parent process's memory before exec.)
    """
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
