"""Plugins, which few need. A line of `serve_app.base.plugins` names each."""
