"""Plugins for serving stacks: their words become layouts, plans and transfers. The floors below know the rest."""
