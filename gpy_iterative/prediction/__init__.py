"""(filled by its owner)"""
