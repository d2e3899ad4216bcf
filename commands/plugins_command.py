"""`penstock plugins`: what is loaded, as a table or as a page of the documentation."""

from penstock.commands.parser_page import parser_page
from penstock.commands.plugins_arguments import PluginsArguments
from penstock.plugins.manager import Plugins


def run_plugins_command(arguments: PluginsArguments) -> int:
    plugins = Plugins.start(
        arguments.plugins, arguments.without, reasoning_parser=arguments.reasoning_parser, tool_parser=arguments.tool_parser
    )
    print(parser_page(plugins) if arguments.is_markdown else plugin_table(plugins), end="" if arguments.is_markdown else "\n")
    return 0


def plugin_table(plugins: Plugins) -> str:
    """Kind, name (with a star where it is selected), distribution and version, plug-in, aliases."""
    rows = [("KIND", "NAME", "FROM", "PLUG-IN", "ALIASES")]
    for row in plugins.listing():
        source = f"{row.distribution} {row.version}" if row.distribution else "-"
        rows.append((row.kind, row.name + " *" * row.is_active, source, row.plugin, ", ".join(row.aliases)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
