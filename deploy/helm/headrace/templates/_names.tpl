{{- define "headrace.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "headrace.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "headrace.name" . -}}
{{- (contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name)) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- /* What tells this installation's objects from others, and what selectors use. */ -}}
{{- define "headrace.selector" -}}
app.kubernetes.io/name: {{ include "headrace.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* Where each service listens: its own default. */ -}}
{{- define "headrace.ports" -}}
gateway: 8000
inference: 8010
registry: 8020
collector: 8031
scorer: 8032
judge: 8033
trainer: 8034
broker: 8035
console: 8040
{{- end }}

{{- define "headrace.port" -}}
{{- get (include "headrace.ports" . | fromYaml) .service | toString -}}
{{- end }}

{{- /* The services of this installation. */ -}}
{{- define "headrace.services" -}}
{{- $services := list "gateway" "inference" "registry" "collector" "scorer" -}}
{{- if .Values.judge.enabled }}{{ $services = append $services "judge" }}{{ end -}}
{{- if .Values.trainers }}{{ $services = append $services "trainer" }}{{ end -}}
{{- if .Values.console.enabled }}{{ $services = append $services "console" }}{{ end -}}
{{- if .Values.single.enabled }}{{ $services = append $services "broker" }}{{ end -}}
{{- $services | join " " -}}
{{- end }}

{{- /* Of a service: what computes with vLLM or Trinity is in images of their own. */ -}}
{{- define "headrace.imageName" -}}
{{- if include "headrace.onVllm" . }}inference-vllm
{{- else if include "headrace.onTrinity" . }}trinity
{{- else }}{{ .service }}
{{- end -}}
{{- end }}

{{- define "headrace.onVllm" -}}
{{- if and (eq .service "inference") (eq .values.engine "vllm") }}yes{{ end -}}
{{- end }}

{{- define "headrace.onTrinity" -}}
{{- if and (eq .service "trainer") (eq (.values.backend | default "torch") "trinity") }}yes{{ end -}}
{{- end }}

{{- define "headrace.image" -}}
{{- with .root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
headrace-{{ include "headrace.imageName" . }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}
