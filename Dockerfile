# Training and serving in one image:
#
#   docker build -t xe_retrieval .                                # CPU; --build-arg EXTRA=cuda or tpu
#   docker run -p 8000:8000 -v $PWD:/data xe_retrieval \
#     python -m xe_retrieval.serve --index=/data/index --host=0.0.0.0 --token=@/data/token
#
#   docker run --no-healthcheck -v $PWD:/data xe_retrieval \
#     python -m xe_retrieval.main --config=/opt/xe_retrieval/configs/own.py:… --workdir=runs/mine
#
# Every other command of the project runs the same way; /data is the working directory.
FROM python:3.11-slim-bookworm

ARG EXTRA=""
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/xe_retrieval
COPY setup.py constraints.txt README.md ./
COPY xe_retrieval ./xe_retrieval
COPY configs ./configs
RUN pip install -c constraints.txt -e ".${EXTRA:+[$EXTRA]}" \
  && useradd --create-home --uid 10001 xe \
  && mkdir /data \
  && chown xe /data

USER 10001
WORKDIR /data
ENV PYTHONPATH=/opt/xe_retrieval HF_HOME=/data/.huggingface
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
CMD ["python", "-m", "xe_retrieval.serve", "--help"]
