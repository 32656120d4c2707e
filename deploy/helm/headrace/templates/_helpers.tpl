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

{{- /* What a schema cannot say: values that do not go together. Each message names the value and the remedy. */ -}}
{{- define "headrace.checks" -}}
{{- $single := .Values.single.enabled -}}
{{- if and (not $single) (not .Values.bus.address) -}}
{{- fail "bus.address is empty: name your Kafka (host:port), or set single.enabled for the embedded broker" -}}
{{- end -}}
{{- if and $single .Values.bus.address -}}
{{- fail "bus.address is set and single.enabled too: a single Pod has the embedded broker; set single.enabled to false" -}}
{{- end -}}
{{- if and (not $single) (not .Values.database.urlSecret.name) -}}
{{- fail "database.urlSecret.name is empty: name a Secret with the URL of your PostgreSQL, or set single.enabled for SQLite" -}}
{{- end -}}
{{- if and $single .Values.database.urlSecret.name -}}
{{- fail "database.urlSecret.name is set and single.enabled too: a single Pod has SQLite; set single.enabled to false" -}}
{{- end -}}
{{- if and $single (gt (len .Values.trainers) 1) -}}
{{- fail "trainers has several lineages: a single Pod runs one; set single.enabled to false" -}}
{{- end -}}
{{- if .Values.judge.enabled -}}
{{- range $name := list "baseUrl" "model" -}}
{{- if not (get $.Values.judge.endpoint $name) -}}
{{- fail (printf "judge.endpoint.%s is empty: say whom the judge asks, or set judge.enabled to false" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.code.configMap .Values.code.claim -}}
{{- fail "code.configMap and code.claim are both set: the folder comes from one of them" -}}
{{- end -}}
{{- if and (eq .Values.inference.engine "vllm") (not .Values.inference.gpus) -}}
{{- fail "inference.engine is \"vllm\" and inference.gpus is 0: the image headrace-inference-vllm computes on GPUs; set inference.gpus, or engine to \"torch\"" -}}
{{- end -}}
{{- $lineages := dict -}}
{{- range $name, $trainer := .Values.trainers -}}
{{- if and (eq ($trainer.backend | default "torch") "trinity") (not $trainer.gpus) -}}
{{- fail (printf "trainers.%s.backend is \"trinity\" and its gpus are 0: Trinity computes on GPUs; set gpus, or backend to \"torch\"" $name) -}}
{{- end -}}
{{- if hasKey $lineages $trainer.lineage -}}
{{- fail (printf "trainers.%s.lineage is %q, as is that of trainers.%s: a lineage has one owner" $name $trainer.lineage (get $lineages $trainer.lineage)) -}}
{{- end -}}
{{- $_ := set $lineages $trainer.lineage $name -}}
{{- end -}}
{{- if and .Values.console.enabled (not (dig "console" "users" list (fromToml .Values.settings))) -}}
{{- fail "console.enabled is true and settings has no console.users: list at least one user with the SHA-256 of a token, or set console.enabled to false" -}}
{{- end -}}
{{- include "headrace.noSecrets" . -}}
{{- end }}

{{- define "headrace.noSecrets" -}}
{{- $settings := fromToml .Values.settings -}}
{{- with $settings.Error }}{{ fail (printf "settings is not valid TOML: %s" .) }}{{ end -}}
{{- $found := dict
  "security.internal_key" (dig "security" "internal_key" "" $settings)
  "judge.endpoint.api_key" (dig "judge" "endpoint" "api_key" "" $settings)
  "database.url" (dig "database" "url" "" $settings) -}}
{{- range $name, $value := $found -}}
{{- if $value -}}
{{- fail (printf "settings has %s: a ConfigMap is no place for it; see internalKeySecret, judge.endpoint.apiKeySecret and database.urlSecret" $name) -}}
{{- end -}}
{{- end -}}
{{- end }}
