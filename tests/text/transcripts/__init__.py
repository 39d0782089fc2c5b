"""Texts that models write, broken ones included: a module for each form.

``TABLES`` of a module: names of a reasoning parser and a tool parser, or None, with transcripts for the two.
"""
