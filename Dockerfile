# docker build -t effcompile . && docker run --rm -v "$PWD:/work" effcompile plan model.py
FROM python:3.11-slim
# a compiler for torch.compile and for our kernels in C++; without one both are left out, in words
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY effcompile effcompile
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu -c constraints.txt \
 && pip install --no-cache-dir '.[hf]' -c constraints.txt
RUN useradd --create-home user
USER user
ENV EFFCOMPILE_CACHE=/home/user/.cache/effcompile
WORKDIR /work
ENTRYPOINT ["effcompile"]
CMD ["--help"]
