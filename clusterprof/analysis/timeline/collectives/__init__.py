"""Operations between ranks: rows, matching across ranks, streaming in order of time."""
