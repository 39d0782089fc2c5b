"""The models that pipedec ships: two target-draft pairs, a BiTA, and a draft for SmolLM2. Data only."""
