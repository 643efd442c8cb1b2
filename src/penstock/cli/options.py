"""Makes click options: one for each setting declared in `config`, and others that commands share."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from penstock.config.components import COMPONENTS, config_from
from penstock.config.routing import Routing
from penstock.config.setting import Kind, Setting, settings_of
from penstock.config.several import find_table, own_settings
from penstock.config.sources import ConfigFile, all_settings, read_config_file, unknown_variables
from penstock.types.errors import ConfigError

if TYPE_CHECKING:
    import ssl

_log = logging.getLogger(__name__)
_Command = TypeVar("_Command", bound=Callable[..., Any])

_FILE_KEY = "penstock.cli.file"
"""Key in the `meta` of click's context for the --config file."""
_WORDS_KEY = "penstock.cli.words"
"""Key of the words that a command was given."""
EPILOG = (
    "Options under Model and below have an environment variable (--block-size is PENSTOCK_BLOCK_SIZE) and a key in the "
    "--config file (block_size). Flags override the environment, which overrides the file, which overrides the default."
)


FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
NOT_IN_THE_LAB = ("served_model_name", "chat_template", "tool_call_parser", "reasoning_parser", "generation_config")
"""Settings that only matter to a server that generates text."""
OF_TENANTS = ("api_key", "api_key_file", "api_keys_file", "trust_tenant_header")
"""Settings by which a server has several tenants, which share no cached prefixes by default."""


def printable(text: str) -> str:
    """Replace control characters, so that text from a model's file can't control the terminal."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)


class NumberRange(click.FloatRange):
    """Click type of finite numbers in a range. `click.FloatRange` takes "nan", and "inf" if it has no maximum."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return float(number)


class GroupedCommand(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS_KEY] = tuple(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        titles = {item.env: component.title for _, component in COMPONENTS for item in settings_of(component)}
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                groups.setdefault(titles.get(str(param.envvar), "Options"), []).append(record)
        for title in sorted(groups, key=lambda title: title != "Options"):
            with formatter.section(title):
                formatter.write_dl(groups[title])


def add_options(*options: Callable[[Any], Any]) -> Callable[[_Command], _Command]:

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


slo_option = click.option(
    "--slo", multiple=True, metavar="METRIC=TIME", help="Such as ttft=2s, tpot=100ms, itl=200ms, e2e=30s. Repeatable."
)
router_option = click.option(
    "--router",
    default="round-robin",
    envvar="PENSTOCK_ROUTER",
    show_default=True,
    metavar="NAME",
    help="With several replicas: round-robin, least-work, prefix or MODULE:CLASS.",
)


def is_given(name: str) -> bool:
    """Return whether an option was given on the command line, rather than in the environment or a file."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def option_text(value: object, separator: str = " ") -> str:
    """Return an option's value for a report, without Python's brackets. Stages are joined as in the option: 2.0x10.0."""
    if type(value) is tuple:  # no named tuple: bounds of replicas have their own text
        return separator.join(option_text(one, "x") for one in value)
    return str(value)


def setting_keys(*components: str) -> list[str]:
    """Return the keys of all settings of these components of the config, such as `kv`."""
    return [item.key for name, component in COMPONENTS if name in components for item in settings_of(component)]


def config_options(*components: str, without: tuple[str, ...] = ()) -> Callable[[_Command], _Command]:
    """Decorate a command with `--config` and an option for each setting of these components, except keys in `without`.

    `model_argument` and `model_option` add the setting `model`.
    """

    def decorate(command: _Command) -> _Command:
        for name, component in reversed(COMPONENTS):
            if name in components:
                for item in reversed(settings_of(component)):
                    if item.key not in ("model", *without):
                        command = _option(item)(command)
        return config_file_option(command)

    return decorate


def model_option(command: _Command) -> _Command:
    return setting_option("model", "-m")(command)


def setting_option(key: str, *short: str, raises: bool = True) -> Callable[[_Command], _Command]:
    """Decorate a command with one setting's option. If `raises` is false, the command gets an invalid value's error instead."""
    return _option(next(item for item in all_settings() if item.key == key), *short, raises=raises)


def model_argument(command: Callable[..., Any], *, is_optional: bool = False) -> Callable[..., Any]:
    """Decorate a command with the argument MODEL and the option --model. The command gets either one as `model`.

    Its [[models]] table sets the command's other values. `is_optional`: the command may need no model. If it needs one, it
    calls `check_named` and `with_table`.
    """

    @functools.wraps(command)
    def with_model(*, model_word: str | None, **values: Any) -> Any:
        if model_word is not None:
            if is_given("model"):
                raise click.UsageError("The model is given twice: as an argument and with --model.")
            values["model"] = model_word
        elif not is_optional:
            check_named()
        return command(**(values if is_optional else with_table(values)))

    return click.argument("model_word", required=False, metavar="[MODEL]", shell_complete=complete_model)(
        model_option(with_model)
    )


def check_named() -> None:
    """Raise UsageError if no model is named although the --config file has [[models]]."""
    tables = tables_of_file()
    if tables and not is_named():
        raise click.UsageError(f"The --config file has [[models]]: name one of them, such as {tables[0]['model']}.")


def is_named() -> bool:
    """Return whether a model is named, as an argument or by a setting."""
    context = click.get_current_context()
    return bool(context.params.get("model_word")) or context.get_parameter_source("model") is not ParameterSource.DEFAULT


def with_table(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a command's values with those of the [[models]] table that their model names. Flags win over the table."""
    context = click.get_current_context()
    table = own_settings(find_table(values["model"], tables_of_file()) or {})
    names = {name for name in table if name == "model" or not is_given(name)}
    params = [param for param in context.command.params if param.name in names and param.envvar]
    return {**values, **{str(param.name): param.process_value(context, table[str(param.name)]) for param in params}}


def models_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the arguments MODEL... and the option --model.

    The command gets the models as `words`, and the [[models]] tables of the --config file as `tables`.
    """

    @functools.wraps(command)
    def with_models(*, model_words: tuple[str, ...], model: str, **values: Any) -> Any:
        if model_words and is_given("model"):
            raise click.UsageError("The model is given twice: as an argument and with --model.")
        source = click.get_current_context().get_parameter_source("model")
        words = model_words or (() if source is ParameterSource.DEFAULT else (model,))
        return command(words=words, tables=tables_of_file(), **values)

    return click.argument("model_words", nargs=-1, metavar="[MODEL]...", shell_complete=complete_model)(
        model_option(with_models)
    )


def given_words() -> list[str]:
    """Return the words after the command's name, as they were given."""
    return list(click.get_current_context().meta[_WORDS_KEY])


def tables_of_file() -> tuple[dict[str, object], ...]:
    """Return the [[models]] tables of the --config file."""
    return _file().models


def routing_of_file() -> Routing:
    """Return the [[routes]], [[upstreams]] and [[pipelines]] tables of the --config file.

    Each upstream gets the command's limits of tenants.
    """
    params, routing = click.get_current_context().params, _file().routing
    limits = config_from({key: params[key] for key in setting_keys("admission") if key in params}).admission.tenant_limits
    return replace(routing, upstreams=tuple([replace(one, tenant_limits=limits) for one in routing.upstreams]))


def settings_of_file(model: str | None) -> dict[str, object]:
    """Return all settings of the --config file and of the [[models]] table that `model` names."""
    file = _file()
    table = find_table(model, file.models) if model else None
    return {**file.values, **(table or {})}


def _file() -> ConfigFile:
    file: ConfigFile = click.get_current_context().meta.get(_FILE_KEY, ConfigFile({}))
    return file


class _Option(click.Option):
    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the variable's value, or None. For a Service called penstock, Kubernetes sets PENSTOCK_PORT to its address."""
        value = super().resolve_envvar_value(ctx)
        return None if value and self.envvar == "PENSTOCK_PORT" and value.startswith("tcp://") else value


def _option(item: Setting, *short: str, raises: bool = True) -> Callable[[_Command], _Command]:
    if item.kind is Kind.FLAG:
        names = [f"{item.flag}/--no-{item.flag[2:]}", item.key]
        return click.option(
            *names,
            type=_Truth(item),
            default=item.default,
            envvar=item.env,
            show_default=item.default_doc or True,
            help=item.doc,
        )
    return click.option(
        *short,
        item.flag,
        item.key,
        cls=_Option,
        type=click.UNPROCESSED,
        callback=_parser(item, raises=raises),
        metavar=_metavar(item),
        shell_complete=complete_model if item.key == "model" else _values_of(item),
        default=item.default if item.default_doc else item.shown_default,  # as text, as the help shows it
        envvar=item.env,
        multiple=item.is_multiple,
        show_default=item.default_doc or True,
        help=item.doc,
    )


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a model in the catalogue, or else a file name, in the shell."""
    del ctx, param
    from penstock.models.catalog import CATALOG

    names = [CompletionItem(entry.name) for entry in CATALOG if entry.name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


def _values_of(item: Setting) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        del ctx, param
        if item.kind is Kind.PATH:
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(choice) for choice in item.choices if choice.startswith(incomplete)]

    return complete


def _metavar(item: Setting) -> str:
    if not item.choices:
        return item.kind.upper()
    return "{" + ",".join([*item.choices, "MODULE:CLASS"] if item.takes_class else item.choices) + "}"


class _Truth(click.types.BoolParamType):
    """Click type of flags, with our own rules for environment variables, which are stricter than click's."""

    def __init__(self, item: Setting) -> None:
        self._item = item

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._item.parse(value)
        except ValueError as error:
            raise _bad_value(f"{error}.", ctx, param) from None


def _parser(item: Setting, *, raises: bool) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a click callback that parses an option's value. If `raises` is false, it returns the error of a wrong value."""

    def parse(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            if item.is_multiple:
                return tuple(item.parse(entry) for entry in value)
            return None if value is None else item.parse(value)
        except ValueError as error:
            bad = _bad_value(f"{error}.", ctx, param)
            if raises:
                raise bad from None
            return bad

    return parse


def _bad_value(cause: str, ctx: click.Context | None, param: click.Parameter | None) -> click.BadParameter:
    is_variable = ctx and param and param.name and ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT
    hint = f"'{param.envvar}'" if is_variable and param else None
    return click.BadParameter(cause, ctx, param, hint)


def config_file_option(command: _Command) -> _Command:
    """Decorate a command with `--config`, a file that sets the defaults of the other options."""
    return click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        envvar="PENSTOCK_CONFIG",
        is_eager=True,
        expose_value=False,
        callback=_use_config_file,
        metavar="FILE.toml",
        help="File with settings.",
    )(command)


def _use_config_file(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    try:
        file = read_config_file(path)
    except ConfigError as error:
        raise _bad_value(str(error), ctx, param) from None
    # An option without a variable is the command's own, even if it has a setting's name, such as the seed of a workload.
    own = {param.name for param in ctx.command.params if not param.envvar}
    ctx.default_map = {**(ctx.default_map or {}), **{key: value for key, value in file.values.items() if key not in own}}
    ctx.meta[_FILE_KEY] = file


tls_options = add_options(
    click.option(
        "--cafile",
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE.pem",
        help="Certificates to trust: a CA's or the server's own.  [default: the system's]",
    ),
    click.option("--insecure", is_flag=True, help="Accept any certificate: traffic can be intercepted."),
)


def client_tls(cafile: str | None, *, insecure: bool) -> ssl.SSLContext | None:
    """Return the TLS context for https with these options, or None for Python's default.

    Raises ConfigError for a bad `cafile`, and UsageError if both are given.
    """
    import ssl

    if insecure and cafile:
        raise click.UsageError("--insecure believes any certificate: leave out --cafile.")
    if insecure:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    if cafile is None:
        return None
    try:
        return ssl.create_default_context(cafile=cafile)
    except OSError as error:  # includes ssl.SSLError
        raise ConfigError(f"{cafile} has no certificate: {error}.", remedy="Name a PEM file with --cafile.") from error


def warn_of_unknown_variables() -> None:
    """Log a warning for each environment variable that looks like a setting but is unknown."""
    for warning in unknown_variables(os.environ):
        _log.warning(warning)
